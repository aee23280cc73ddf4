// A stand-in for the stub of a CUDA toolkit (lib64/stubs/libcuda.so), for tests only: every function says that it is a stub.

enum : int { StubLibrary = 34 };

extern "C" {

int cuDriverGetVersion(int *) { return StubLibrary; }
int cuInit(unsigned) { return StubLibrary; }
int cuDeviceGetCount(int *) { return StubLibrary; }

} // extern "C"
