/* The fake NVML with memory and processes as the null GPU has them (NULL_GPU_STATE), and what torch asks besides. */
#define nvmlDeviceGetHandleByIndex_v2 fixed_handle
#define nvmlDeviceGetMemoryInfo fixed_memory
#define nvmlDeviceGetUUID fixed_uuid
#define nvmlDeviceGetComputeRunningProcesses_v3 fixed_processes
#include "../fake_nvml/fake_nvml.c"
#undef nvmlDeviceGetHandleByIndex_v2
#undef nvmlDeviceGetMemoryInfo
#undef nvmlDeviceGetUUID
#undef nvmlDeviceGetComputeRunningProcesses_v3

#include "null_gpu.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

/* NULL where no test shares the state. */
static DeviceState *shared(unsigned device) {
  static DeviceState *states;
  const char *path = getenv("NULL_GPU_STATE");
  if (!states && path) {
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(DeviceState[DEVICES]))) abort();
    states = mmap(0, sizeof(DeviceState[DEVICES]), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (states == MAP_FAILED) abort();
  }
  return states ? &states[device] : NULL;
}
enum { GPU_IS_LOST = 15 };

/* A lost GPU is counted, but has no handle and no identity any more. */
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
  DeviceState *state = index < DEVICES ? shared(index) : NULL;
  return state && state->fault ? GPU_IS_LOST : fixed_handle(index, out);
}
int nvmlDeviceGetUUID(Device *d, char *out, unsigned length) {
  DeviceState *state = shared(d->index);
  return state && state->fault ? GPU_IS_LOST : fixed_uuid(d, out, length);
}

int nvmlDeviceGetMemoryInfo(Device *d, Memory *out) {
  DeviceState *state = shared(d->index);
  out->total = (unsigned long long)(atof(variable("NULL_GPU_GIB", "80")) * (1ull << 30));
  out->used = 0;
  for (int i = 0; state && i < PROCESSES; i++)
    if (lives(state->uses[i].owner)) out->used += state->uses[i].bytes + CONTEXT;
  out->free = out->total > out->used ? out->total - out->used : 0;
  return state && state->fault ? GPU_IS_LOST : OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *d, unsigned *count, Process *out) {
  DeviceState *state = shared(d->index);
  unsigned found = 0, room = *count;
  for (int i = 0; state && i < PROCESSES; i++)
    if (lives(state->uses[i].owner) && found++ < room)
      out[found - 1] = (Process){.pid = (unsigned)state->uses[i].owner.pid, .used = state->uses[i].bytes + CONTEXT};
  return *count = found, state && state->fault ? GPU_IS_LOST : found > room ? INSUFFICIENT_SIZE : OK;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, Device **out) {
  unsigned number = 0;
  sscanf(bus, "%*x:%x", &number);
  return nvmlDeviceGetHandleByIndex_v2(number ? number - 1 : 0, out);
}
int nvmlDeviceGetComputeRunningProcesses(Device *d, unsigned *count, Process *out) {
  return nvmlDeviceGetComputeRunningProcesses_v3(d, count, out);
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetFieldValues(void) { return NOT_SUPPORTED; }
