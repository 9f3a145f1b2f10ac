/* Finding functions by name, and the names of results. */
#define _GNU_SOURCE
#include "libcuda.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* ---- cuGetProcAddress ---- */

#define CHECKPOINT_VERSION 12080

/*
 * Functions whose present form has another symbol than their name. `since`: CUDA version of that form; the newest that
 * the caller knows comes first. A symbol that this library does not have keeps a caller from getting an older form.
 */
static const struct {
    const char *name;
    const char *symbol;
    int since;
} renamed[] = {
    {"cuDeviceTotalMem", "cuDeviceTotalMem_v2", 3020},
    {"cuDeviceGetUuid", "cuDeviceGetUuid_v2", 11040},
    {"cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease_v2", 11000},
    {"cuCtxCreate", "cuCtxCreate_v4", 12050},
    {"cuCtxCreate", "cuCtxCreate_v3", 11040},
    {"cuCtxCreate", "cuCtxCreate_v2", 3020},
    {"cuCtxDestroy", "cuCtxDestroy_v2", 4000},
    {"cuCtxGetDevice", "cuCtxGetDevice_v2", 13000},
    {"cuCtxSynchronize", "cuCtxSynchronize_v2", 13000},
    {"cuStreamDestroy", "cuStreamDestroy_v2", 4000},
    {"cuMemAlloc", "cuMemAlloc_v2", 3020},
    {"cuMemFree", "cuMemFree_v2", 3020},
    {"cuMemGetInfo", "cuMemGetInfo_v2", 3020},
    {"cuMemcpyHtoD", "cuMemcpyHtoD_v2", 3020},
    {"cuMemcpyDtoH", "cuMemcpyDtoH_v2", 3020},
    {"cuMemsetD8", "cuMemsetD8_v2", 3020},
    {"cuIpcOpenMemHandle", "cuIpcOpenMemHandle_v2", 11000},
    {"cuGetProcAddress", "cuGetProcAddress_v2", 12000},
};

/* The address of one of this library's own symbols: another libcuda.so.1 in the process must not answer for it. */
static void *own_symbol(const char *name)
{
    static void *self;
    Dl_info info;
    if (!self && dladdr((void *)own_symbol, &info))
        self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    return self ? dlsym(self, name) : NULL;
}

/* A library that says it is older than the checkpoint API has not got it. */
static int is_hidden(const char *name)
{
    return strncmp(name, "cuCheckpoint", 12) == 0 && kyb_cuda_version() < CHECKPOINT_VERSION;
}

static void *find(const char *name, int version)
{
    if (strncmp(name, "cu", 2) != 0 || is_hidden(name))
        return NULL;
    for (size_t index = 0; index < sizeof renamed / sizeof *renamed; index++) {
        if (strcmp(renamed[index].name, name) == 0 && version >= renamed[index].since)
            return own_symbol(renamed[index].symbol);
    }
    return own_symbol(name);
}

/* Success with a NULL function when there is none, as the driver answers; `status` 1 says so. */
KYB_EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    (void)flags;
    if (!name || !function)
        return CUDA_ERROR_INVALID_VALUE;
    *function = find(name, version);
    if (status)
        *status = *function ? 0 : 1;
    return *function || status ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

KYB_EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

/* ---- names ---- */

static const struct {
    CUresult result;
    const char *name;
    const char *text;
} results[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static int position(CUresult result)
{
    for (size_t index = 0; index < sizeof results / sizeof *results; index++) {
        if (results[index].result == result)
            return (int)index;
    }
    return -1;
}

KYB_EXPORT CUresult cuGetErrorName(CUresult result, const char **name)
{
    int index = position(result);
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    *name = index < 0 ? NULL : results[index].name;
    return index < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

KYB_EXPORT CUresult cuGetErrorString(CUresult result, const char **text)
{
    int index = position(result);
    if (!text)
        return CUDA_ERROR_INVALID_VALUE;
    *text = index < 0 ? NULL : results[index].text;
    return index < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
