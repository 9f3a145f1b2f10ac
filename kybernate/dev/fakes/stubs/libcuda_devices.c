/* cuInit and the devices that a process sees. */
#define _GNU_SOURCE
#include "libcuda.h"

#include <ctype.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_DEVICES 512

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t initialised_by; /* 0: no process */
static struct kyb_device devices[MAX_DEVICES];
static int device_count;
static char nodes[MAX_DEVICES * 64];

int kyb_cuda_version(void)
{
    const char *text = getenv("KYB_STUB_CUDA_VERSION");
    int version = text ? atoi(text) : 0;
    return version > 0 ? version : 13000;
}

CUresult kyb_ready(void)
{
    return initialised_by == getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

const struct kyb_device *kyb_device(CUdevice ordinal)
{
    return ordinal >= 0 && ordinal < device_count ? &devices[ordinal] : NULL;
}

const char *kyb_device_nodes(void) { return nodes; }

CUresult kyb_tell(const char *call, const char *members)
{
    static __thread char reply[4096];
    int code = kyb_call(call, members, reply, sizeof reply);
    return code < 0 ? CUDA_ERROR_UNKNOWN : code;
}

/* ---- which devices ---- */

static int is_listed(const char *list, const struct kyb_device *device, int ordinal)
{
    char copy[4096], *rest = copy;
    snprintf(copy, sizeof copy, "%s", list);
    for (char *word = strsep(&rest, ","); word; word = strsep(&rest, ",")) {
        if (strcmp(word, "all") == 0 || strcmp(word, device->uuid) == 0 || strcmp(word, device->parent) == 0)
            return 1;
        if (isdigit((unsigned char)*word) && strlen(word) < 4 && atoi(word) == ordinal)
            return 1;
    }
    return 0;
}

/* The container runtime's part: which device nodes there are. Without the variable nothing is hidden (a bare host). */
static void keep_injected(void)
{
    const char *list = getenv("NVIDIA_VISIBLE_DEVICES");
    int kept = 0;
    nodes[0] = '[', nodes[1] = '\0';
    for (int index = 0; index < device_count; index++) {
        if (list && !is_listed(list, &devices[index], index))
            continue;
        if (kept > 0)
            strcat(nodes, ", ");
        kyb_quote(nodes, sizeof nodes, devices[index].uuid);
        devices[kept++] = devices[index];
    }
    strcat(nodes, "]");
    device_count = kept;
}

static int is_instance(const struct kyb_device *device) { return strcmp(device->uuid, device->parent) != 0; }

/* What CUDA counts: instances stand behind the whole GPUs, and of several it sees the first only. */
static int counted(void)
{
    int count = 0;
    while (count < device_count && (count == 0 || !is_instance(&devices[count - 1])))
        count++;
    return count;
}

/* The place of what one word of CUDA_VISIBLE_DEVICES means: a number, a UUID or its beginning; -1 if none. */
static int chosen(const char *word)
{
    if (isdigit((unsigned char)*word))
        return atoi(word) < counted() ? atoi(word) : -1;
    if (strncmp(word, "GPU-", 4) != 0 && strncmp(word, "MIG-", 4) != 0)
        return -1;
    for (int index = 0; index < device_count; index++) {
        if (strncmp(devices[index].uuid, word, strlen(word)) == 0)
            return index;
    }
    return -1;
}

/* The user's part: CUDA_VISIBLE_DEVICES chooses and orders; as in CUDA, the first wrong word ends the list, and a
 * device that is named twice leaves none. */
static void keep_chosen(void)
{
    static struct kyb_device kept[MAX_DEVICES];
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    char copy[4096], *rest = copy, used[MAX_DEVICES] = {0};
    int count = 0;
    if (!list)
        return;
    snprintf(copy, sizeof copy, "%s", list);
    for (char *word = strsep(&rest, ","); word; word = strsep(&rest, ",")) {
        int index = chosen(word + strspn(word, " "));
        if (index < 0)
            break;
        if (used[index]) {
            count = 0;
            break;
        }
        used[index] = 1;
        kept[count++] = devices[index];
    }
    memcpy(devices, kept, sizeof devices);
    device_count = count;
}

static void read_device(const char *gpu)
{
    struct kyb_device *device = &devices[device_count];
    if (device_count == MAX_DEVICES || kyb_int(gpu, "lost", 0))
        return;
    device_count++;
    kyb_text(gpu, "uuid", device->uuid, sizeof device->uuid);
    if (kyb_text(kyb_member(gpu, "mig"), "parent", device->parent, sizeof device->parent) != 0)
        strcpy(device->parent, device->uuid);
    kyb_text(gpu, "name", device->name, sizeof device->name);
    kyb_text(gpu, "pci_bus_id", device->pci_bus_id, sizeof device->pci_bus_id);
    device->total_bytes = (size_t)kyb_int(gpu, "memory_bytes", 0);
    device->numa_node = (int)kyb_int(gpu, "numa_node", -1);
}

/* CUDA shows a process at most one MIG instance. */
static void keep_one_instance(void)
{
    int kept = 0, instances = 0;
    for (int index = 0; index < device_count; index++) {
        if (!is_instance(&devices[index]) || instances++ == 0)
            devices[kept++] = devices[index];
    }
    device_count = kept;
}

/* All that can be used: GPUs that are not in MIG mode, and behind them the MIG instances of the others. */
static int read_devices(void)
{
    char *reply = malloc(KYB_REPLY_SIZE);
    int code = reply ? kyb_call("devices", NULL, reply, KYB_REPLY_SIZE) : -1;
    device_count = 0;
    if (code == 0) {
        const char *gpus = kyb_member(reply, "gpus"), *instances = kyb_member(reply, "instances");
        for (int index = 0, count = kyb_count(gpus); index < count; index++) {
            const char *gpu = kyb_element(gpus, index);
            if (!kyb_int(gpu, "mig_enabled", 0))
                read_device(gpu);
        }
        for (int index = 0, count = kyb_count(instances); index < count; index++)
            read_device(kyb_element(instances, index));
    }
    free(reply);
    return code;
}

KYB_EXPORT CUresult cuInit(unsigned int flags)
{
    CUresult result = CUDA_SUCCESS;
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (initialised_by != 0) {
        result = kyb_ready();
    } else if (read_devices() != 0) {
        result = CUDA_ERROR_NO_DEVICE; /* what a machine without a working kernel driver says */
    } else {
        keep_injected();
        keep_chosen();
        keep_one_instance();
        if (device_count == 0)
            result = CUDA_ERROR_NO_DEVICE;
        else
            result = kyb_attach(1);
        if (result == CUDA_SUCCESS)
            initialised_by = getpid();
    }
    pthread_mutex_unlock(&lock);
    return result;
}

KYB_EXPORT CUresult cuDriverGetVersion(int *version)
{
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = kyb_cuda_version();
    return CUDA_SUCCESS;
}

/* ---- what they are ---- */

static CUresult look_up(CUdevice ordinal, const void *out, const struct kyb_device **device)
{
    CUresult result = kyb_ready();
    *device = kyb_device(ordinal);
    if (result != CUDA_SUCCESS)
        return result;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    return *device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

KYB_EXPORT CUresult cuDeviceGetCount(int *count)
{
    CUresult result = kyb_ready();
    if (result == CUDA_SUCCESS && !count)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *count = device_count;
    return result;
}

KYB_EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    const struct kyb_device *found;
    CUresult result = look_up(ordinal, device, &found);
    if (result == CUDA_SUCCESS)
        *device = ordinal;
    return result;
}

KYB_EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    const struct kyb_device *found;
    CUresult result = look_up(device, name, &found);
    if (result == CUDA_SUCCESS && length > 0)
        snprintf(name, (size_t)length, "%s", found->name);
    return result;
}

static void parse_uuid(const char *text, CUuuid *uuid)
{
    int digits = 0;
    memset(uuid, 0, sizeof *uuid);
    for (text += 4; *text && digits < 32; text++) {
        int letter = tolower((unsigned char)*text);
        if (!isxdigit(letter))
            continue;
        int value = isdigit(letter) ? letter - '0' : letter - 'a' + 10;
        uuid->bytes[digits / 2] |= (unsigned char)(digits % 2 ? value : value << 4);
        digits++;
    }
}

void kyb_format_uuid(const CUuuid *uuid, char *out)
{
    char *at = out + sprintf(out, "GPU-");
    for (int index = 0; index < 16; index++)
        at += sprintf(at, index == 4 || index == 6 || index == 8 || index == 10 ? "-%02x" : "%02x", uuid->bytes[index]);
}

/* The first version knows no MIG: it names the whole GPU. */
KYB_EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    const struct kyb_device *found;
    CUresult result = look_up(device, uuid, &found);
    if (result == CUDA_SUCCESS)
        parse_uuid(found->parent, uuid);
    return result;
}

KYB_EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    const struct kyb_device *found;
    CUresult result = look_up(device, uuid, &found);
    if (result == CUDA_SUCCESS)
        parse_uuid(found->uuid, uuid);
    return result;
}

/* As with real drivers this stays what it was at cuInit, even when a restore has moved the process elsewhere. */
KYB_EXPORT CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device)
{
    const struct kyb_device *found;
    CUresult result = look_up(device, text, &found);
    if (result == CUDA_SUCCESS && length > 0)
        snprintf(text, (size_t)length, "%s", found->pci_bus_id);
    return result;
}

KYB_EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    const struct kyb_device *found;
    CUresult result = look_up(device, bytes, &found);
    if (result == CUDA_SUCCESS)
        *bytes = found->total_bytes;
    return result;
}

/* A device of compute capability 9.0; of all other attributes this library says 0. */
KYB_EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    enum { COMPUTE_CAPABILITY_MAJOR = 75, HOST_NUMA_ID = 134 };
    const struct kyb_device *found;
    CUresult result = look_up(device, value, &found);
    if (result != CUDA_SUCCESS)
        return result;
    *value = 0;
    if (attribute == COMPUTE_CAPABILITY_MAJOR)
        *value = 9;
    if (attribute == HOST_NUMA_ID)
        *value = found->numa_node;
    return result;
}
