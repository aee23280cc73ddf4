// Stand-in for the stub library of a CUDA toolkit (lib64/stubs/libcuda.so), for tests only: every function returns the stub
// error.

enum : int { StubLibrary = 34 };

extern "C" {

int cuDriverGetVersion(int *) { return StubLibrary; }
int cuInit(unsigned) { return StubLibrary; }
int cuDeviceGetCount(int *) { return StubLibrary; }

} // extern "C"
