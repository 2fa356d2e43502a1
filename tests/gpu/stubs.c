/* What torch asks of CUDA's runtime while it traces and compiles for a GPU that is not there: one device, nothing to
 * wait for, nothing to copy or launch. Loaded before the real runtime, whose other functions stay as they are.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { MAJOR = 75, MINOR = 76, PROCESSORS = 16 };

int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { (void)device; return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaDeviceSynchronize(void) { return 0; }
int cudaStreamSynchronize(void *stream) { (void)stream; return 0; }
int cudaStreamIsCapturing(void *stream, int *capturing) { (void)stream; *capturing = 0; return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = 0; return 0; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority)
{
    (void)flags, (void)priority;
    *stream = (void *)1;
    return 0;
}
int cudaEventCreateWithFlags(void **event, unsigned flags) { (void)flags; *event = (void *)1; return 0; }
int cudaEventRecord(void *event, void *stream) { (void)event, (void)stream; return 0; }
int cudaEventQuery(void *event) { (void)event; return 0; }
int cudaEventDestroy(void *event) { (void)event; return 0; }
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { (void)stream, (void)event, (void)flags; return 0; }

int cudaDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    *value = attribute == MAJOR ? 9 : attribute == MINOR ? 0 : attribute == PROCESSORS ? 132 : 1;
    return 0;
}

/* inductor makes small tensors as examples for its patterns, which nobody reads */
int cudaMalloc(void **memory, size_t size) { (void)size; *memory = (void *)((size_t)1 << 40); return 0; }
int cudaFree(void *memory) { (void)memory; return 0; }
int cudaMemGetInfo(size_t *available, size_t *total) { *available = *total = (size_t)80 << 30; return 0; }
int cudaHostAlloc(void **memory, size_t size, unsigned flags) { (void)flags; *memory = calloc(size, 1); return 0; }
int cudaFreeHost(void *memory) { free(memory); return 0; }
int cudaStreamQuery(void *stream) { (void)stream; return 0; }
int cudaStreamGetPriority(void *stream, int *priority) { (void)stream; *priority = 0; return 0; }
int cudaDeviceCanAccessPeer(int *can, int one, int other) { (void)one, (void)other; *can = 0; return 0; }
int cudaDeviceGetDefaultMemPool(void **pool, int device) { (void)device; *pool = NULL; return 0; }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream)
{
    (void)to, (void)from, (void)size, (void)kind, (void)stream;
    return 0;
}
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                     int *found)
{
    (void)name, (void)version, (void)flags;
    *function = NULL;
    if (found)
        *found = 1;
    return 0;
}
int cudaThreadExchangeStreamCaptureMode(int *mode) { (void)mode; return 0; }
int cudaPointerGetAttributes(void *attributes, const void *pointer)
{
    (void)pointer;
    memset(attributes, 0, 32);
    return 0;
}
int cudaLaunchKernel(const void *function, long grid, long block, void **arguments, size_t shared, void *stream)
{
    (void)function, (void)grid, (void)block, (void)arguments, (void)shared, (void)stream;
    return 0;
}

/* the layout of the properties is CUDA's own; only the name is asked for */
int cudaGetDeviceProperties(char *properties, int device)
{
    (void)device;
    strcpy(properties, "NVIDIA H100 80GB HBM3");
    return 0;
}

/* of the driver, under whose name this library is loaded */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    (void)device;
    *flags = 0, *active = 1;
    return 0;
}
