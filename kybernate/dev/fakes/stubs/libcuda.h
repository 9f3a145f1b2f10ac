/*
 * What the parts of the stub libcuda.so.1 share: the driver API's types as far as they are used (their layout is the
 * public C ABI of CUDA 12.8 to 13), result codes, and the device list.
 *
 * The library keeps no truth: whether a process runs, is locked or parked, what memory is in use, who waits and what
 * fails is decided by the fake GPU daemon alone, to which every call that has an effect goes. Here are only names for
 * its things: devices, contexts and addresses.
 */
#ifndef KYB_LIBCUDA_H
#define KYB_LIBCUDA_H

#include <stddef.h>
#include <stdint.h>

#include "wire.h"

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct kyb_context *CUcontext;
typedef struct kyb_stream *CUstream;

typedef struct {
    unsigned char bytes[16];
} CUuuid;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_UNKNOWN = 999,
};

/* One GPU, or one MIG instance, that this process may use, as it was when cuInit was called. */
struct kyb_device {
    char uuid[64]; /* "GPU-…" or "MIG-…": its name at the daemon */
    char parent[64]; /* the GPU of a MIG instance, else the same as uuid */
    char name[256];
    char pci_bus_id[32];
    int numa_node;
    size_t total_bytes;
};

/* CUDA version that the library says it is: KYB_STUB_CUDA_VERSION, 13000 by default. 1000 * major + 10 * minor. */
int kyb_cuda_version(void);

/* CUDA_SUCCESS after cuInit in this very process; a forked child has to live without CUDA, as with the real one. */
CUresult kyb_ready(void);

/* The device of an ordinal, or NULL. */
const struct kyb_device *kyb_device(CUdevice ordinal);

/* "["GPU-…", …]": the GPUs whose device nodes the process has (NVIDIA_VISIBLE_DEVICES). */
const char *kyb_device_nodes(void);

/* Tells the daemon that this process uses CUDA; `initialized`: it called cuInit and has no context yet. */
CUresult kyb_attach(int initialized);

/* Maps /dev/nvidia-uvm once more: a CUDA process has one such mapping, one with managed memory has several. */
void kyb_map_uvm(void);

/* The device of the calling thread's context, or NULL. */
const struct kyb_device *kyb_current_device(void);

/* A call whose reply matters no further; CUDA_ERROR_UNKNOWN when the daemon is gone. */
CUresult kyb_tell(const char *call, const char *members);

/* "GPU-…" from 16 bytes; out holds 41 bytes or more. */
void kyb_format_uuid(const CUuuid *uuid, char *out);

#endif
