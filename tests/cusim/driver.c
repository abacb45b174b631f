// A stand-in for NVIDIA's libcuda, for tests of the launcher: it says on standard output what was asked of it.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static int nothing(void) { return 0; }

static int version(int* out) {
  *out = 13000;
  return 0;
}

static int count(int* out) {
  *out = 1;
  return 0;
}

static int device(int* out, int number) {
  *out = number;
  return 0;
}

static int current(void** context) {
  *context = (void*)0x40;
  return 0;
}

static int load(void** library, const char* code, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  printf("load %.3s\n", code + 1);
  *library = (void*)0x10;
  return 0;
}

static int kernel(void** out, void* library, const char* name) {
  printf("kernel %s of %p\n", name, library);
  *out = (void*)(0x20 + strlen(name));
  return 0;
}

static int function(void** out, void* from) {
  printf("function of %p\n", from);
  *out = (char*)from + 0x100;
  return 0;
}

// Fails with CUDA_ERROR_INVALID_VALUE for 77 bytes of shared memory. Kernels: a pointer, int64, int64, Key.
static int launch(void* which, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                  unsigned shared, void* stream, void** args, void** extra) {
  const uint64_t* key = args[3];
  printf("launch %p grid %u %u %u block %u %u %u shared %u stream %p: %p %lld %lld seed %llx offset %llu\n", which, gx, gy,
         gz, bx, by, bz, shared, stream, *(void**)args[0], *(long long*)args[1], *(long long*)args[2],
         (unsigned long long)key[0], (unsigned long long)key[1]);
  return shared == 77;
}

int cuGetProcAddress_v2(const char* name, void** out, int wanted, uint64_t flags, int* status) {
  *out = !strcmp(name, "cuDriverGetVersion")    ? (void*)version
         : !strcmp(name, "cuDeviceGetCount")    ? (void*)count
         : !strcmp(name, "cuDeviceGet")         ? (void*)device
         : !strcmp(name, "cuCtxGetCurrent")     ? (void*)current
         : !strcmp(name, "cuLibraryLoadData")   ? (void*)load
         : !strcmp(name, "cuLibraryGetKernel")  ? (void*)kernel
         : !strcmp(name, "cuKernelGetFunction") ? (void*)function
         : !strcmp(name, "cuLaunchKernel")      ? (void*)launch
                                                : (void*)nothing;
  if (status) *status = 0;
  return 0;
}
