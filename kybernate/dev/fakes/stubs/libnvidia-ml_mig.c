/* NVML: GPUs that MIG splits. */
#define _GNU_SOURCE
#include "libnvidia-ml.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_INSTANCES 7U
#define MULTIPROCESSORS_OF_A_SLICE 14

/* Which fake cards could be split at all: by their name, or since they are. */
static int can_be_split(const char *gpu)
{
    char name[96];
    if (kyb_int(gpu, "mig_enabled", 0))
        return 1;
    return kyb_text(gpu, "name", name, sizeof name) == 0 && (strstr(name, "A100") || strstr(name, "H100"));
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    struct kyb_reading reading;
    nvmlReturn_t result = kyb_nvml_read(device, __func__, &reading);
    if (result != NVML_SUCCESS)
        return result;
    if (!current || !pending)
        result = NVML_ERROR_INVALID_ARGUMENT;
    else if (device->parent || !can_be_split(reading.device))
        result = NVML_ERROR_NOT_SUPPORTED;
    else
        *current = *pending = (unsigned int)kyb_int(reading.device, "mig_enabled", 0);
    kyb_nvml_done(&reading);
    return result;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    struct kyb_reading reading;
    nvmlReturn_t result = kyb_nvml_read(device, __func__, &reading);
    if (result != NVML_SUCCESS)
        return result;
    if (!count)
        result = NVML_ERROR_INVALID_ARGUMENT;
    else
        *count = can_be_split(reading.device) ? MAX_INSTANCES : 0;
    kyb_nvml_done(&reading);
    return result;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index,
                                                            nvmlDevice_t *instance)
{
    nvmlReturn_t result = kyb_nvml_check(device, __func__);
    if (result != NVML_SUCCESS)
        return result;
    if (!instance || index >= MAX_INSTANCES)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (int number = 0;; number++) {
        nvmlDevice_t one = kyb_nvml_device(number);
        if (!one)
            return NVML_ERROR_NOT_FOUND;
        if (one->parent == device && one->number == (int)index) {
            *instance = one;
            return NVML_SUCCESS;
        }
    }
}

static nvmlReturn_t check_instance(nvmlDevice_t instance, const char *call, const void *out)
{
    nvmlReturn_t result = kyb_nvml_check(instance, call);
    if (result != NVML_SUCCESS)
        return result;
    return out && instance->parent ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is)
{
    nvmlReturn_t result = kyb_nvml_check(device, __func__);
    if (result == NVML_SUCCESS && !is)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *is = device->parent != NULL;
    return result;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t instance, nvmlDevice_t *device)
{
    nvmlReturn_t result = check_instance(instance, __func__, device);
    if (result == NVML_SUCCESS)
        *device = instance->parent;
    return result;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t instance, unsigned int *id)
{
    nvmlReturn_t result = check_instance(instance, __func__, id);
    if (result == NVML_SUCCESS)
        *id = (unsigned int)instance->gpu_instance;
    return result;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t instance, unsigned int *id)
{
    nvmlReturn_t result = check_instance(instance, __func__, id);
    if (result == NVML_SUCCESS)
        *id = (unsigned int)instance->compute_instance;
    return result;
}

/* "3g.40gb" or "1c.3g.40gb" */
static void slices_of(const char *profile, unsigned int *slices, unsigned int *compute)
{
    *slices = *compute = 0;
    if (sscanf(profile, "%uc.%ug", compute, slices) == 2)
        return;
    sscanf(profile, "%ug", slices);
    *compute = *slices;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    struct kyb_reading reading;
    char profile[32];
    nvmlReturn_t result = kyb_nvml_read(device, __func__, &reading);
    if (result != NVML_SUCCESS)
        return result;
    if (!attributes) {
        result = NVML_ERROR_INVALID_ARGUMENT;
    } else if (kyb_text(kyb_member(reading.device, "mig"), "profile", profile, sizeof profile) != 0) {
        result = NVML_ERROR_NOT_SUPPORTED;
    } else {
        memset(attributes, 0, sizeof *attributes);
        slices_of(profile, &attributes->gpuInstanceSliceCount, &attributes->computeInstanceSliceCount);
        attributes->multiprocessorCount = attributes->computeInstanceSliceCount * MULTIPROCESSORS_OF_A_SLICE;
        attributes->sharedCopyEngineCount = attributes->gpuInstanceSliceCount;
        attributes->memorySizeMB = (unsigned long long)kyb_int(reading.device, "memory_bytes", 0) >> 20;
    }
    kyb_nvml_done(&reading);
    return result;
}
