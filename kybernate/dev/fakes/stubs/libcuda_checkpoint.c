/*
 * The checkpoint API: six calls about a process by its pid. The caller needs no context, and cuInit only for a restore
 * (the real driver wants that or persistence mode).
 */
#include "libcuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_VERSION 12080 /* driver 570 */
#define GPU_PAIRS_VERSION 13000 /* driver 580 */

typedef int CUprocessState;

/* Every args struct is 64 bytes; what is reserved must be zero. */
typedef struct {
    unsigned int timeoutMs;
    unsigned int reserved0;
    uint64_t reserved1[7];
} CUcheckpointLockArgs;

typedef struct {
    uint64_t reserved[8];
} CUcheckpointCheckpointArgs;

typedef struct {
    CUuuid oldUuid;
    CUuuid newUuid;
} CUcheckpointGpuPair;

typedef struct {
    CUcheckpointGpuPair *gpuPairs;
    unsigned int gpuPairsCount;
    char reserved[44];
    uint64_t reserved1;
} CUcheckpointRestoreArgs;

typedef struct {
    uint64_t reserved[8];
} CUcheckpointUnlockArgs;

_Static_assert(sizeof(CUcheckpointLockArgs) == 64, "public ABI");
_Static_assert(sizeof(CUcheckpointCheckpointArgs) == 64, "public ABI");
_Static_assert(sizeof(CUcheckpointRestoreArgs) == 64, "public ABI");
_Static_assert(sizeof(CUcheckpointGpuPair) == 32, "public ABI");

static int is_zero(const void *data, size_t count)
{
    for (const unsigned char *at = data; count > 0; at++, count--) {
        if (*at)
            return 0;
    }
    return 1;
}

/* `more`: further members, beginning with a comma, or "". */
static CUresult ask(const char *call, int pid, const char *more, char *reply, size_t size)
{
    size_t room = strlen(more) + 64;
    char *members = malloc(room);
    if (kyb_cuda_version() < FIRST_VERSION) { /* an older library has no such symbol; see cuGetProcAddress as well */
        free(members);
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (!members)
        return CUDA_ERROR_OUT_OF_MEMORY;
    snprintf(members, room, "\"pid\": %d%s", pid, more);
    int code = kyb_call(call, members, reply, size);
    free(members);
    return code < 0 ? CUDA_ERROR_UNKNOWN : code;
}

KYB_EXPORT CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state)
{
    static const char *const names[] = {"RUNNING", "LOCKED", "CHECKPOINTED", "FAILED"};
    char reply[4096], name[32];
    if (!state)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = ask("get_state", pid, "", reply, sizeof reply);
    if (result != CUDA_SUCCESS)
        return result;
    kyb_text(reply, "state", name, sizeof name);
    for (int number = 0; number < 4; number++) {
        if (strcmp(name, names[number]) == 0) {
            *state = number;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_UNKNOWN;
}

KYB_EXPORT CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
    char reply[4096];
    if (!tid)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = ask("get_restore_tid", pid, "", reply, sizeof reply);
    if (result == CUDA_SUCCESS)
        *tid = (int)kyb_int(reply, "tid", 0);
    return result;
}

KYB_EXPORT CUresult cuCheckpointProcessLock(int pid, const CUcheckpointLockArgs *args)
{
    char more[64] = "", reply[4096];
    if (args && (args->reserved0 != 0 || !is_zero(args->reserved1, sizeof args->reserved1)))
        return CUDA_ERROR_INVALID_VALUE;
    if (args)
        snprintf(more, sizeof more, ", \"timeout_ms\": %u", args->timeoutMs);
    return ask("lock", pid, more, reply, sizeof reply);
}

/* The first bytes are reserved up to CUDA 13.3 and ask for custom storage from 13.4 on, which this library has not. */
KYB_EXPORT CUresult cuCheckpointProcessCheckpoint(int pid, const CUcheckpointCheckpointArgs *args)
{
    char reply[4096];
    if (args && !is_zero(args, sizeof *args))
        return kyb_cuda_version() < 13040 ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_SUPPORTED;
    return ask("checkpoint", pid, "", reply, sizeof reply);
}

/* ", "gpu_map": {"GPU-old": "GPU-new", …}", to be freed; NULL without memory. */
static char *format_map(const CUcheckpointRestoreArgs *args)
{
    char from[48], to[48], *text = malloc(64 + 128 * (size_t)args->gpuPairsCount);
    if (!text)
        return NULL;
    char *at = text + sprintf(text, ", \"gpu_map\": {");
    for (unsigned int index = 0; index < args->gpuPairsCount; index++) {
        kyb_format_uuid(&args->gpuPairs[index].oldUuid, from);
        kyb_format_uuid(&args->gpuPairs[index].newUuid, to);
        at += sprintf(at, "%s\"%s\": \"%s\"", index ? ", " : "", from, to);
    }
    strcpy(at, "}");
    return text;
}

/* Before CUDA 13 the place of gpuPairs was reserved, so a map is an invalid value. */
static int is_valid(const CUcheckpointRestoreArgs *args)
{
    if (!args)
        return 1;
    if (kyb_cuda_version() < GPU_PAIRS_VERSION)
        return is_zero(args, sizeof *args);
    if (!is_zero(args->reserved, sizeof args->reserved) || args->reserved1 != 0 || args->gpuPairsCount > 4096)
        return 0;
    return (args->gpuPairsCount == 0) == (args->gpuPairs == NULL);
}

KYB_EXPORT CUresult cuCheckpointProcessRestore(int pid, const CUcheckpointRestoreArgs *args)
{
    char reply[4096], *map = NULL;
    if (kyb_cuda_version() >= FIRST_VERSION && kyb_ready() != CUDA_SUCCESS)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!is_valid(args))
        return CUDA_ERROR_INVALID_VALUE;
    if (args && args->gpuPairsCount > 0 && !(map = format_map(args)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = ask("restore", pid, map ? map : "", reply, sizeof reply);
    free(map);
    return result;
}

KYB_EXPORT CUresult cuCheckpointProcessUnlock(int pid, const CUcheckpointUnlockArgs *args)
{
    char reply[4096];
    if (args && !is_zero(args, sizeof *args))
        return CUDA_ERROR_INVALID_VALUE;
    return ask("unlock", pid, "", reply, sizeof reply);
}
