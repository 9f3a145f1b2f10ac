/* NVML: opening it, finding devices, and what the system says of itself. */
#define _GNU_SOURCE
#include "libnvidia-ml.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define MAX_DEVICES 576 /* 64 GPUs, each with up to 8 instances */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int openings;
static struct kyb_nvml_device devices[MAX_DEVICES];
static int device_count, gpu_count;

/* ---- opening ---- */

static nvmlDevice_t add(const char *one, nvmlDevice_t parent, int number)
{
    if (device_count == MAX_DEVICES)
        return NULL;
    nvmlDevice_t device = &devices[device_count++];
    const char *mig = kyb_member(one, "mig");
    kyb_text(one, "uuid", device->uuid, sizeof device->uuid);
    kyb_text(one, "pci_bus_id", device->pci_bus_id, sizeof device->pci_bus_id);
    device->parent = parent;
    device->number = number;
    device->gpu_instance = (int)kyb_int(mig, "gpu_instance", -1);
    device->compute_instance = (int)kyb_int(mig, "compute_instance", -1);
    return device;
}

static void add_instances(const char *instances)
{
    int next[MAX_DEVICES] = {0};
    for (int index = 0, count = kyb_count(instances); index < count; index++) {
        const char *one = kyb_element(instances, index);
        char uuid[96];
        kyb_text(kyb_member(one, "mig"), "parent", uuid, sizeof uuid);
        nvmlDevice_t parent = kyb_nvml_find(uuid);
        if (parent)
            add(one, parent, next[parent->number]++);
    }
}

static nvmlReturn_t read_machine(void)
{
    char *reply = malloc(KYB_REPLY_SIZE);
    int code = reply ? kyb_call("devices", NULL, reply, KYB_REPLY_SIZE) : -1;
    if (code == 0) {
        const char *gpus = kyb_member(reply, "gpus");
        device_count = 0;
        gpu_count = kyb_count(gpus);
        for (int index = 0; index < gpu_count; index++)
            add(kyb_element(gpus, index), NULL, index);
        add_instances(kyb_member(reply, "instances"));
    }
    free(reply);
    return code == 0 ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED;
}

KYB_EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    pthread_mutex_lock(&lock);
    nvmlReturn_t result = openings ? NVML_SUCCESS : read_machine();
    if (result == NVML_SUCCESS)
        openings++;
    pthread_mutex_unlock(&lock);
    return result;
}

KYB_EXPORT nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

KYB_EXPORT nvmlReturn_t nvmlShutdown(void)
{
    pthread_mutex_lock(&lock);
    nvmlReturn_t result = openings ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
    if (openings)
        openings--;
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- what the other files share ---- */

nvmlReturn_t kyb_nvml_ready(void) { return openings ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED; }

nvmlDevice_t kyb_nvml_device(int number) { return number < device_count ? &devices[number] : NULL; }

nvmlDevice_t kyb_nvml_find(const char *uuid)
{
    for (int number = 0; number < device_count; number++) {
        if (strcmp(devices[number].uuid, uuid) == 0)
            return &devices[number];
    }
    return NULL;
}

void kyb_nvml_naming(char *out, size_t size, const char *key, const char *uuid)
{
    snprintf(out, size, "\"%s\": ", key);
    kyb_quote(out, size, uuid);
}

/* The entry of a UUID in the answer to "devices". */
static const char *entry(const char *reply, const char *uuid)
{
    const char *lists[] = {kyb_member(reply, "gpus"), kyb_member(reply, "instances")};
    char found[96];
    for (int list = 0; list < 2; list++) {
        for (int index = 0, count = kyb_count(lists[list]); index < count; index++) {
            const char *one = kyb_element(lists[list], index);
            if (kyb_text(one, "uuid", found, sizeof found) == 0 && strcmp(found, uuid) == 0)
                return one;
        }
    }
    return NULL;
}

nvmlReturn_t kyb_nvml_read(nvmlDevice_t device, const char *call, struct kyb_reading *reading)
{
    nvmlReturn_t result = kyb_nvml_ready();
    if (result != NVML_SUCCESS)
        return result;
    if (device < devices || device >= devices + device_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    reading->reply = malloc(KYB_REPLY_SIZE);
    if (!reading->reply)
        return NVML_ERROR_MEMORY;
    if (kyb_call("devices", NULL, reading->reply, KYB_REPLY_SIZE) != 0) {
        result = NVML_ERROR_UNKNOWN;
    } else {
        reading->device = entry(reading->reply, device->uuid);
        if (!reading->device || kyb_int(reading->device, "lost", 0))
            result = NVML_ERROR_GPU_IS_LOST;
        else
            result = (nvmlReturn_t)kyb_int(kyb_member(reading->device, "nvml"), call, NVML_SUCCESS);
    }
    if (result != NVML_SUCCESS)
        kyb_nvml_done(reading);
    return result;
}

void kyb_nvml_done(struct kyb_reading *reading)
{
    free(reading->reply);
    reading->reply = NULL;
}

nvmlReturn_t kyb_nvml_check(nvmlDevice_t device, const char *call)
{
    struct kyb_reading reading;
    nvmlReturn_t result = kyb_nvml_read(device, call, &reading);
    if (result == NVML_SUCCESS)
        kyb_nvml_done(&reading);
    return result;
}

void kyb_nvml_pci(const char *address, nvmlPciInfo_t *pci)
{
    unsigned int domain = 0, bus = 0, device = 0;
    memset(pci, 0, sizeof *pci);
    sscanf(address, "%x:%x:%x", &domain, &bus, &device);
    pci->domain = domain, pci->bus = bus, pci->device = device;
    pci->pciDeviceId = 0x20B510DE;
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", domain, bus & 0xFF, device & 0x1F);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", domain & 0xFFFF, bus & 0xFF, device & 0x1F);
}

/* ---- finding devices ---- */

KYB_EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    nvmlReturn_t result = kyb_nvml_ready();
    if (result == NVML_SUCCESS && !count)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *count = (unsigned int)gpu_count; /* lost ones too */
    return result;
}

static nvmlReturn_t hand_out(nvmlDevice_t found, nvmlReturn_t otherwise, const char *call, nvmlDevice_t *device)
{
    if (kyb_nvml_ready() != NVML_SUCCESS)
        return NVML_ERROR_UNINITIALIZED;
    if (!device)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!found)
        return otherwise;
    *device = found;
    return kyb_nvml_check(found, call);
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    nvmlDevice_t found = index < (unsigned int)gpu_count ? &devices[index] : NULL;
    return hand_out(found, NVML_ERROR_INVALID_ARGUMENT, __func__, device);
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    if (!uuid)
        return NVML_ERROR_INVALID_ARGUMENT;
    return hand_out(kyb_nvml_find(uuid), NVML_ERROR_NOT_FOUND, __func__, device);
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    nvmlPciInfo_t wanted, own;
    nvmlDevice_t found = NULL;
    if (!bus_id)
        return NVML_ERROR_INVALID_ARGUMENT;
    kyb_nvml_pci(bus_id, &wanted);
    for (int index = 0; index < gpu_count && !found; index++) {
        kyb_nvml_pci(devices[index].pci_bus_id, &own);
        if (strcmp(own.busId, wanted.busId) == 0)
            found = &devices[index];
    }
    return hand_out(found, NVML_ERROR_NOT_FOUND, __func__, device);
}

/* ---- the system ---- */

static int cuda_version(void)
{
    const char *version = getenv("KYB_STUB_CUDA_VERSION");
    int number = version ? atoi(version) : 0;
    return number > 0 ? number : 13000;
}

/* A driver release that came with that CUDA version. */
static const char *driver_version(void)
{
    int version = cuda_version();
    if (version >= 13020)
        return "595.71.05";
    if (version >= 13000)
        return "580.95.05";
    if (version >= 12080)
        return "570.195.03";
    return version >= 12040 ? "550.163.01" : "535.274.02";
}

static nvmlReturn_t give_text(const char *prefix, const char *text, char *out, unsigned int size)
{
    nvmlReturn_t result = kyb_nvml_ready();
    if (result != NVML_SUCCESS)
        return result;
    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    int length = snprintf(out, size, "%s%s", prefix, text);
    return length >= 0 && (unsigned int)length < size ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

KYB_EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    return give_text("", driver_version(), version, length);
}

KYB_EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    return give_text(cuda_version() >= 13000 ? "13." : "12.", driver_version(), version, length);
}

KYB_EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    nvmlReturn_t result = kyb_nvml_ready();
    if (result == NVML_SUCCESS && !version)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *version = cuda_version();
    return result;
}

KYB_EXPORT const char *nvmlErrorString(nvmlReturn_t result)
{
    switch (result) {
    case NVML_SUCCESS:
        return "Success";
    case NVML_ERROR_UNINITIALIZED:
        return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT:
        return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
        return "Not Supported";
    case NVML_ERROR_NOT_FOUND:
        return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    case NVML_ERROR_TIMEOUT:
        return "Timeout";
    case NVML_ERROR_GPU_IS_LOST:
        return "GPU is lost";
    case NVML_ERROR_MEMORY:
        return "Insufficient Memory";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH:
        return "Argument version mismatch";
    default:
        return "Unknown Error";
    }
}
