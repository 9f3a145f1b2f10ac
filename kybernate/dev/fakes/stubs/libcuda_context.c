/* Contexts, streams and waiting for them. The first context makes the process one that uses GPUs, at the daemon. */
#define _GNU_SOURCE
#include "libcuda.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct kyb_context {
    CUdevice device;
    int users; /* of a primary context */
};

#define MAX_PRIMARIES 512

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kyb_context primaries[MAX_PRIMARIES];
static __thread CUcontext current;

const struct kyb_device *kyb_current_device(void) { return current ? kyb_device(current->device) : NULL; }

static void *sleep_for_ever(void *unused)
{
    for (;;)
        pause();
    return unused;
}

/* The real driver creates a thread of such a name in each process that uses CUDA. A forked child has none. */
static void start_cuda_thread(void)
{
    static pid_t has_one;
    pthread_t thread;
    if (has_one == getpid() || pthread_create(&thread, NULL, sleep_for_ever, NULL) != 0)
        return;
    has_one = getpid();
    pthread_setname_np(thread, "cuda00001400006");
    pthread_detach(thread);
}

/* Seat: what the device plugin gave the container. KYB_STUB_COMMUNICATOR: plays a live NCCL communicator. */
CUresult kyb_attach(int initialized)
{
    char members[65536] = "\"seat\": ";
    const char *seat = getenv("KYB_GPU_SEAT"), *communicator = getenv("KYB_STUB_COMMUNICATOR");
    if (!seat || !*seat)
        strcat(members, "null");
    else if (kyb_quote(members, 1024, seat) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (communicator && *communicator) {
        strcat(members, ", \"communicator\": ");
        if (kyb_quote(members, 2048, communicator) != 0)
            return CUDA_ERROR_INVALID_VALUE;
    }
    size_t have = strlen(members);
    snprintf(members + have, sizeof members - have, ", \"device_nodes\": %s%s", kyb_device_nodes(),
             initialized ? ", \"initialized\": true" : "");
    CUresult result = kyb_tell("attach", members);
    if (result == CUDA_SUCCESS && !initialized)
        start_cuda_thread();
    return result;
}

/* A context is in use on the GPU: NVML shows the process from now on. What a context takes is set by
 * KYB_STUB_CONTEXT_BYTES, 0 by default (a real one takes some hundred MB). */
static CUresult open_context(CUdevice device)
{
    static int mapped;
    char members[256];
    const char *bytes = getenv("KYB_STUB_CONTEXT_BYTES");
    CUresult result = kyb_attach(0);
    if (result != CUDA_SUCCESS)
        return result;
    if (!mapped)
        kyb_map_uvm();
    mapped = 1;
    snprintf(members, sizeof members, "\"gpu\": \"%s\", \"bytes\": %lld", kyb_device(device)->uuid,
             bytes ? atoll(bytes) : 0);
    return kyb_tell("alloc", members);
}

static CUresult check(CUdevice device, const void *out)
{
    CUresult result = kyb_ready();
    if (result != CUDA_SUCCESS)
        return result;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    return kyb_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

KYB_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    CUresult result = check(device, context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&lock);
    struct kyb_context *primary = &primaries[device];
    primary->device = device;
    if (primary->users == 0)
        result = open_context(device);
    if (result == CUDA_SUCCESS) {
        primary->users++;
        *context = primary;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* Unlike the real one it leaves the memory that was not freed to the end of the process. */
KYB_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    CUresult result = check(device, primaries);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&lock);
    if (primaries[device].users == 0)
        result = CUDA_ERROR_INVALID_CONTEXT;
    else
        primaries[device].users--;
    pthread_mutex_unlock(&lock);
    return result;
}

KYB_EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
    (void)flags;
    CUresult result = check(device, context);
    if (result != CUDA_SUCCESS)
        return result;
    CUcontext made = calloc(1, sizeof *made);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->device = device;
    result = open_context(device);
    if (result != CUDA_SUCCESS) {
        free(made);
        return result;
    }
    *context = current = made;
    return result;
}

/* CUDA 13's cuCtxCreate; its parameters (affinity, shared resources) have no meaning here. */
KYB_EXPORT CUresult cuCtxCreate_v4(CUcontext *context, const void *parameters, unsigned int flags, CUdevice device)
{
    (void)parameters;
    return cuCtxCreate_v2(context, flags, device);
}

KYB_EXPORT CUresult cuCtxDestroy_v2(CUcontext context)
{
    CUresult result = kyb_ready();
    if (result != CUDA_SUCCESS)
        return result;
    if (!context || (context >= primaries && context < primaries + MAX_PRIMARIES))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (current == context)
        current = NULL;
    free(context);
    return CUDA_SUCCESS;
}

KYB_EXPORT CUresult cuCtxSetCurrent(CUcontext context)
{
    CUresult result = kyb_ready();
    if (result == CUDA_SUCCESS)
        current = context;
    return result;
}

KYB_EXPORT CUresult cuCtxGetCurrent(CUcontext *context)
{
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    *context = current;
    return kyb_ready();
}

KYB_EXPORT CUresult cuCtxGetDevice(CUdevice *device)
{
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    if (!current)
        return CUDA_ERROR_INVALID_CONTEXT;
    *device = current->device;
    return kyb_ready();
}

/* ---- waiting ---- */

/* The real library dereferences what the checkpoint took away (gpunap: 30 of 30). The process dies of SIGSEGV. */
static void crash(void)
{
    volatile int *volatile gone = NULL;
    *gone = 1;
}

/* Waits while the GPU works; returns at once while the process is locked; kills it when this is the first call of a
 * parked process. All three are for the daemon to say. */
static CUresult synchronize(void)
{
    char reply[4096];
    CUresult result = kyb_ready();
    if (result != CUDA_SUCCESS)
        return result;
    if (!current)
        return CUDA_ERROR_INVALID_CONTEXT;
    result = kyb_call("synchronize", NULL, reply, sizeof reply);
    if (result == CUDA_SUCCESS && kyb_int(reply, "crash", 0))
        crash();
    return result < 0 ? CUDA_ERROR_UNKNOWN : result;
}

KYB_EXPORT CUresult cuCtxSynchronize(void) { return synchronize(); }

/* CUDA 13's form, which names the context. */
KYB_EXPORT CUresult cuCtxSynchronize_v2(CUcontext context)
{
    CUcontext before = current;
    current = context ? context : current;
    CUresult result = synchronize();
    current = before;
    return result;
}

KYB_EXPORT CUresult cuStreamSynchronize(CUstream stream)
{
    (void)stream; /* all streams are one: nothing is computed here */
    return synchronize();
}

KYB_EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
    (void)flags;
    CUresult result = kyb_ready();
    if (result != CUDA_SUCCESS)
        return result;
    if (!stream)
        return CUDA_ERROR_INVALID_VALUE;
    *stream = malloc(1);
    return *stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

KYB_EXPORT CUresult cuStreamDestroy_v2(CUstream stream)
{
    free(stream);
    return kyb_ready();
}
