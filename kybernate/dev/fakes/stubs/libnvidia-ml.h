/*
 * NVML as far as the stub plays it: types with the layouts of NVIDIA's ABI, and what its source files share.
 * Every reading comes from the fake GPU daemon; only handles and event sets live here.
 */
#ifndef KYB_LIBNVIDIA_ML_H
#define KYB_LIBNVIDIA_ML_H

#include "wire.h"

typedef enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_MEMORY = 20,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_UNKNOWN = 999,
} nvmlReturn_t;

/* A GPU or a MIG instance. Handles point into a table that lives as long as the process. */
struct kyb_nvml_device {
    char uuid[96];
    char pci_bus_id[32]; /* as sysfs names it */
    struct kyb_nvml_device *parent; /* of a MIG instance; NULL: a GPU */
    int number; /* the GPU's index; among its GPU's instances */
    int gpu_instance, compute_instance;
};
typedef struct kyb_nvml_device *nvmlDevice_t;

typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned int gpu, memory; /* percent */
} nvmlUtilization_t;

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;

typedef struct {
    unsigned int multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount;
    unsigned int sharedJpegCount, sharedOfaCount, gpuInstanceSliceCount, computeInstanceSliceCount;
    unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;

typedef struct {
    unsigned int version;
    unsigned char clusterUuid[16];
    nvmlReturn_t status;
    unsigned int cliqueId;
    unsigned char state;
    unsigned int healthMask;
} nvmlGpuFabricInfo_v2_t;

typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

_Static_assert(sizeof(nvmlPciInfo_t) == 68 && sizeof(nvmlMemory_t) == 24 && sizeof(nvmlMemory_v2_t) == 40, "ABI");
_Static_assert(sizeof(nvmlUtilization_t) == 8, "ABI");
_Static_assert(sizeof(nvmlProcessInfo_t) == 24 && sizeof(nvmlDeviceAttributes_t) == 40, "ABI");
_Static_assert(sizeof(nvmlGpuFabricInfo_v2_t) == 36 && sizeof(nvmlEventData_t) == 32, "ABI");

#define KYB_VERSION_OF(type, number) ((unsigned int)(sizeof(type) | ((number) << 24U)))
#define KYB_NO_INSTANCE 0xFFFFFFFFU

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending);

/* What the daemon says of one device right now. */
struct kyb_reading {
    char *reply;
    const char *device;
};

/*
 * Read a device on behalf of the function `call`. Every success needs kyb_nvml_done.
 * Refuses as NVML does: not initialized, a handle that is none, a lost GPU; and with the code that `inject` armed for
 * this call on this GPU.
 */
nvmlReturn_t kyb_nvml_read(nvmlDevice_t device, const char *call, struct kyb_reading *reading);
void kyb_nvml_done(struct kyb_reading *reading);

/* As kyb_nvml_read where only the refusals matter. */
nvmlReturn_t kyb_nvml_check(nvmlDevice_t device, const char *call);

/* The device with this UUID, or NULL. */
nvmlDevice_t kyb_nvml_find(const char *uuid);

/* The table, in the order of the machine: GPUs, then MIG instances. NULL at the end. */
nvmlDevice_t kyb_nvml_device(int number);

/* "0000:3b:00.0" as the parts and the texts of an nvmlPciInfo_t. */
void kyb_nvml_pci(const char *address, nvmlPciInfo_t *pci);

/* NVML_SUCCESS between nvmlInit and the last nvmlShutdown. */
nvmlReturn_t kyb_nvml_ready(void);

/* Arguments of a call about one device: {"gpu": "GPU-…"} without the braces. */
void kyb_nvml_naming(char *out, size_t size, const char *key, const char *uuid);

#endif
