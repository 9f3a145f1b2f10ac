/*
 * Device memory. The daemon counts it; its contents lie in address space of this process that takes no room until it
 * is written, so that a made-up 80 GiB weigh nothing and what was copied in can be read again after a park.
 */
#define _GNU_SOURCE
#include "libcuda.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct allocation {
    CUdeviceptr address;
    size_t bytes;
    char uuid[64];
    struct allocation *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct allocation *allocations;

static CUresult ready_with_context(void)
{
    CUresult result = kyb_ready();
    if (result != CUDA_SUCCESS)
        return result;
    return kyb_current_device() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult account(const char *call, const char *uuid, size_t bytes)
{
    char members[256];
    snprintf(members, sizeof members, "\"gpu\": \"%s\", \"bytes\": %zu", uuid, bytes);
    return kyb_tell(call, members);
}

static void remember(struct allocation *made)
{
    pthread_mutex_lock(&lock);
    made->next = allocations;
    allocations = made;
    pthread_mutex_unlock(&lock);
}

KYB_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
    CUresult result = ready_with_context();
    if (result != CUDA_SUCCESS)
        return result;
    if (!address || bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct allocation *made = calloc(1, sizeof *made);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    strcpy(made->uuid, kyb_current_device()->uuid);
    result = account("alloc", made->uuid, bytes);
    if (result != CUDA_SUCCESS) {
        free(made);
        return result;
    }
    void *room = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) {
        account("free", made->uuid, bytes);
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    made->address = (CUdeviceptr)(uintptr_t)room;
    made->bytes = bytes;
    remember(made);
    *address = made->address;
    return CUDA_SUCCESS;
}

/* A file of that name beside the daemon's socket stands for the device; a process that may not write there has none. */
void kyb_map_uvm(void)
{
    char path[512];
    const char *socket = getenv("KYB_FAKE_DRIVER"), *slash = socket ? strrchr(socket, '/') : NULL;
    if (!slash || slash - socket > 400)
        return;
    int length = snprintf(path, sizeof path, "%.*s/dev", (int)(slash - socket), socket);
    mkdir(path, 0777);
    strcpy(path + length, "/nvidia-uvm");
    int device = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (device < 0)
        return;
    if (ftruncate(device, 4096) == 0)
        mmap(NULL, 4096, PROT_READ, MAP_SHARED, device, 0);
    close(device);
}

/* Managed memory cannot be checkpointed: the daemon has to know. */
KYB_EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags)
{
    (void)flags;
    CUresult result = ready_with_context();
    if (result == CUDA_SUCCESS)
        kyb_map_uvm();
    if (result == CUDA_SUCCESS)
        result = kyb_tell("mark", "\"managed\": true");
    return result == CUDA_SUCCESS ? cuMemAlloc_v2(address, bytes) : result;
}

static struct allocation *forget(CUdeviceptr address)
{
    struct allocation *found = NULL;
    pthread_mutex_lock(&lock);
    for (struct allocation **link = &allocations; *link; link = &(*link)->next) {
        if ((*link)->address == address) {
            found = *link;
            *link = found->next;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return found;
}

KYB_EXPORT CUresult cuMemFree_v2(CUdeviceptr address)
{
    CUresult result = kyb_ready();
    if (result != CUDA_SUCCESS)
        return result;
    if (address == 0)
        return CUDA_SUCCESS;
    struct allocation *found = forget(address);
    if (!found)
        return CUDA_ERROR_INVALID_VALUE;
    result = account("free", found->uuid, found->bytes);
    if (result != CUDA_SUCCESS) {
        remember(found);
        return result;
    }
    munmap((void *)(uintptr_t)found->address, found->bytes);
    free(found);
    return CUDA_SUCCESS;
}

/* Whether all of it lies in one allocation. */
static int is_allocated(CUdeviceptr address, size_t bytes)
{
    int inside = 0;
    pthread_mutex_lock(&lock);
    for (const struct allocation *one = allocations; one && !inside; one = one->next) {
        size_t offset = address >= one->address ? (size_t)(address - one->address) : (size_t)-1;
        inside = offset <= one->bytes && bytes <= one->bytes - offset;
    }
    pthread_mutex_unlock(&lock);
    return inside;
}

/* Waits, as any CUDA call, until the process runs. */
static CUresult may_use(CUdeviceptr address, size_t bytes)
{
    CUresult result = ready_with_context();
    if (result != CUDA_SUCCESS)
        return result;
    return is_allocated(address, bytes) ? kyb_tell("touch", NULL) : CUDA_ERROR_INVALID_VALUE;
}

KYB_EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes)
{
    CUresult result = may_use(to, bytes);
    if (result == CUDA_SUCCESS)
        memcpy((void *)(uintptr_t)to, from, bytes);
    return result;
}

KYB_EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes)
{
    CUresult result = may_use(from, bytes);
    if (result == CUDA_SUCCESS)
        memcpy(to, (const void *)(uintptr_t)from, bytes);
    return result;
}

KYB_EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count)
{
    CUresult result = may_use(to, count);
    if (result == CUDA_SUCCESS)
        memset((void *)(uintptr_t)to, value, count);
    return result;
}

KYB_EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    char members[128], reply[4096];
    CUresult result = ready_with_context();
    if (result != CUDA_SUCCESS)
        return result;
    if (!free_bytes || !total_bytes)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(members, sizeof members, "\"gpu\": \"%s\"", kyb_current_device()->uuid);
    result = kyb_call("memory", members, reply, sizeof reply);
    if (result != CUDA_SUCCESS)
        return result < 0 ? CUDA_ERROR_UNKNOWN : result;
    *free_bytes = (size_t)kyb_int(reply, "free_bytes", 0);
    *total_bytes = (size_t)kyb_int(reply, "total_bytes", 0);
    return CUDA_SUCCESS;
}

/* ---- CUDA IPC: only that it was used; a process that shares memory cannot be checkpointed ---- */

typedef struct {
    char reserved[64];
} CUipcMemHandle;

KYB_EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    CUresult result = ready_with_context();
    if (result != CUDA_SUCCESS)
        return result;
    if (!handle || !is_allocated(address, 0))
        return CUDA_ERROR_INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    memcpy(handle->reserved, &address, sizeof address);
    return kyb_tell("mark", "\"ipc\": true");
}

/* What another process shares has no contents here: the address is good for nothing but closing it. */
KYB_EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    (void)flags;
    CUresult result = ready_with_context();
    if (result != CUDA_SUCCESS)
        return result;
    if (!address)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(address, handle.reserved, sizeof *address);
    return kyb_tell("mark", "\"ipc\": true");
}

KYB_EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    (void)address;
    return ready_with_context();
}
