/* NVML: what one GPU says of itself, and who uses it. */
#define _GNU_SOURCE
#include "libnvidia-ml.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RESERVE (300ULL << 20) /* what version 1 of the memory reading counts as used, as on real cards */
#define NOT_AVAILABLE (~0ULL)

static nvmlReturn_t give_member(nvmlDevice_t device, const char *call, const char *key, char *out, unsigned int size)
{
    struct kyb_reading reading;
    nvmlReturn_t result = kyb_nvml_read(device, call, &reading);
    if (result != NVML_SUCCESS)
        return result;
    if (!out || kyb_text(reading.device, key, out, size) != 0)
        result = NVML_ERROR_INVALID_ARGUMENT;
    kyb_nvml_done(&reading);
    return result;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    return give_member(device, __func__, "uuid", uuid, length);
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    return give_member(device, __func__, "name", name, length);
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
    struct kyb_reading reading;
    nvmlReturn_t result = kyb_nvml_read(device, __func__, &reading);
    if (result != NVML_SUCCESS)
        return result;
    if (!minor || device->parent)
        result = NVML_ERROR_INVALID_ARGUMENT;
    else
        *minor = (unsigned int)kyb_int(reading.device, "minor", 0);
    kyb_nvml_done(&reading);
    return result;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    nvmlReturn_t result = kyb_nvml_check(device, __func__);
    if (result == NVML_SUCCESS && !index)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *index = (unsigned int)device->number;
    return result;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    nvmlReturn_t result = kyb_nvml_check(device, __func__);
    if (result == NVML_SUCCESS && (!pci || device->parent))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        kyb_nvml_pci(device->pci_bus_id, pci);
    return result;
}

static nvmlReturn_t read_memory(nvmlDevice_t device, const char *call, unsigned long long *total,
                                unsigned long long *used)
{
    struct kyb_reading reading;
    nvmlReturn_t result = kyb_nvml_read(device, call, &reading);
    if (result != NVML_SUCCESS)
        return result;
    *total = (unsigned long long)kyb_int(reading.device, "memory_bytes", 0);
    *used = (unsigned long long)kyb_int(reading.device, "used_bytes", 0);
    kyb_nvml_done(&reading);
    return NVML_SUCCESS;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    unsigned long long total, used;
    if (!memory)
        return NVML_ERROR_INVALID_ARGUMENT;
    nvmlReturn_t result = read_memory(device, __func__, &total, &used);
    if (result != NVML_SUCCESS)
        return result;
    memory->total = total;
    memory->used = used + RESERVE < total ? used + RESERVE : total;
    memory->free = total - memory->used;
    return NVML_SUCCESS;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    unsigned long long total, used;
    if (!memory)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (memory->version != KYB_VERSION_OF(nvmlMemory_v2_t, 2))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    nvmlReturn_t result = read_memory(device, __func__, &total, &used);
    if (result != NVML_SUCCESS)
        return result;
    memory->total = total, memory->used = used, memory->reserved = 0;
    memory->free = total - used;
    return NVML_SUCCESS;
}

/* A number that the daemon reports of a GPU; a MIG instance has no sensors. */
static nvmlReturn_t read_sensor(nvmlDevice_t device, const char *call, const char *name, unsigned int *value)
{
    struct kyb_reading reading;
    nvmlReturn_t result = kyb_nvml_read(device, call, &reading);
    if (result != NVML_SUCCESS)
        return result;
    if (!value)
        result = NVML_ERROR_INVALID_ARGUMENT;
    else if (device->parent)
        result = NVML_ERROR_NOT_SUPPORTED;
    else
        *value = (unsigned int)kyb_int(reading.device, name, 0);
    kyb_nvml_done(&reading);
    return result;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned int sensor, unsigned int *celsius)
{
    if (sensor != 0) /* NVML_TEMPERATURE_GPU, the only one */
        return NVML_ERROR_INVALID_ARGUMENT;
    return read_sensor(device, __func__, "temperature", celsius);
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts)
{
    nvmlReturn_t result = read_sensor(device, __func__, "power", milliwatts);
    if (result == NVML_SUCCESS)
        *milliwatts *= 1000;
    return result;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    unsigned int current = 0, pending = 0;
    if (!utilization)
        return NVML_ERROR_INVALID_ARGUMENT;
    nvmlReturn_t result = nvmlDeviceGetMigMode(device, &current, &pending);
    if (result == NVML_SUCCESS && current) /* not known of a GPU in MIG mode */
        return NVML_ERROR_NOT_SUPPORTED;
    utilization->memory = 0;
    return read_sensor(device, __func__, "utilization", &utilization->gpu);
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, unsigned int *mode)
{
    nvmlReturn_t result = kyb_nvml_check(device, __func__);
    if (result == NVML_SUCCESS && !mode)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *mode = 1;
    return result;
}

/* The node that the GPU's own memory forms: only on machines whose CPU and GPU share coherent memory. */
KYB_EXPORT nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, unsigned int *node)
{
    nvmlReturn_t result = kyb_nvml_check(device, __func__);
    (void)node;
    return result == NVML_SUCCESS ? NVML_ERROR_NOT_SUPPORTED : result;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int words, unsigned long *nodes,
                                                    unsigned int scope)
{
    struct kyb_reading reading;
    nvmlReturn_t result = kyb_nvml_read(device, __func__, &reading);
    (void)scope;
    if (result != NVML_SUCCESS)
        return result;
    long long node = kyb_int(reading.device, "numa_node", -1);
    kyb_nvml_done(&reading);
    if (!nodes || node < 0 || (unsigned long long)node >= words * 64ULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    memset(nodes, 0, words * sizeof *nodes);
    nodes[node / 64] = 1UL << (node % 64);
    return NVML_SUCCESS;
}

/* ---- processes ---- */

static void tell_process(const char *process, int unavailable, nvmlProcessInfo_t *info)
{
    char uuid[96];
    kyb_text(process, "gpu", uuid, sizeof uuid);
    nvmlDevice_t device = kyb_nvml_find(uuid);
    int in_instance = device && device->parent;
    info->pid = (unsigned int)kyb_int(process, "pid", 0);
    info->usedGpuMemory = unavailable ? NOT_AVAILABLE : (unsigned long long)kyb_int(process, "bytes", 0);
    info->gpuInstanceId = in_instance ? (unsigned int)device->gpu_instance : KYB_NO_INSTANCE;
    info->computeInstanceId = in_instance ? (unsigned int)device->compute_instance : KYB_NO_INSTANCE;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                                nvmlProcessInfo_t *infos)
{
    struct kyb_reading reading;
    char members[128];
    nvmlReturn_t result = kyb_nvml_read(device, __func__, &reading);
    if (result != NVML_SUCCESS)
        return result;
    int unavailable = kyb_int(kyb_member(reading.device, "nvml"), "usedGpuMemory", 0) != 0;
    kyb_nvml_naming(members, sizeof members, "gpu", device->uuid);
    if (!count || kyb_call("processes", members, reading.reply, KYB_REPLY_SIZE) != 0) {
        kyb_nvml_done(&reading);
        return count ? NVML_ERROR_UNKNOWN : NVML_ERROR_INVALID_ARGUMENT;
    }
    const char *processes = kyb_member(reading.reply, "processes");
    unsigned int room = infos ? *count : 0;
    *count = (unsigned int)kyb_count(processes);
    for (unsigned int index = 0; index < *count && *count <= room; index++)
        tell_process(kyb_element(processes, (int)index), unavailable, &infos[index]);
    kyb_nvml_done(&reading);
    return *count <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}
