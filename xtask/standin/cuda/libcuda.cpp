// A stand-in for NVIDIA's libcuda.so.1: the part of the driver that Meshstep calls, on the CPU, for tests only.
//
// Streams are deferred: a call queues its work, and work is done only when somebody waits, in an order that a seed chooses
// among all orders that streams and events allow. So a missing wait gives a wrong result under some seed, as it would on a
// GPU on some day. Memory is filled with 0xA5 before it is handed out. A program gets this library only if it asks:
// `probe()` refuses it unless MESHSTEP_STANDIN=1.
//
//   MESHSTEP_STANDIN_DEVICES   how many devices there are (8)
//   MESHSTEP_STANDIN_MEMORY    bytes of each (2^30)
//   MESHSTEP_STANDIN_VERSION   the version it speaks (13000)
//   MESHSTEP_STANDIN_KERNELS   the folder of the kernels, compiled for the CPU (see kernels.cpp)
//   meshstep_standin_seed      chooses the order from here on
//   meshstep_standin_waits     how often the host has waited for a stream or an event
//   meshstep_standin_fail      makes the next call of a function return an error, undone

#include "driver.h"

using namespace standin;

extern "C" {

// For tests.

int meshstep_standin = 1;

void meshstep_standin_seed(uint64_t seed) {
    Guard guard(lock);
    order.seed(seed);
}

uint64_t meshstep_standin_waits() {
    Guard guard(lock);
    return waits;
}

void meshstep_standin_fail(const char *function, int result) {
    Guard guard(lock);
    failures[function] = static_cast<Result>(result);
}

// The driver and its devices.

int cuGetErrorName(int result, const char **text) {
    auto name = names.find(result);
    *text = name == names.end() ? nullptr : name->second;
    return *text ? Success : InvalidValue;
}

int cuDriverGetVersion(int *version) {
    *version = static_cast<int>(setting("MESHSTEP_STANDIN_VERSION", 13000));
    return Success;
}

int cuInit(unsigned) {
    Guard guard(lock);
    if (initialized) return Success;
    size_t count = setting("MESHSTEP_STANDIN_DEVICES", 8);
    if (count == 0) return NoDevice;
    for (size_t i = 0; i < count; ++i) devices.push_back({static_cast<int>(i)});
    initialized = true;
    return Success;
}

int cuDeviceGetCount(int *count) {
    BEGIN(begin(__func__));
    *count = static_cast<int>(devices.size());
    return Success;
}

int cuDeviceGet(int *device, int ordinal) {
    BEGIN(begin(__func__));
    if (ordinal < 0 || static_cast<size_t>(ordinal) >= devices.size()) return InvalidDevice;
    *device = ordinal;
    return Success;
}

int cuDeviceGetName(char *text, int len, int) {
    BEGIN(begin(__func__));
    std::snprintf(text, static_cast<size_t>(len), "Meshstep stand-in");
    return Success;
}

int cuDeviceTotalMem_v2(size_t *bytes, int) {
    BEGIN(begin(__func__));
    *bytes = setting("MESHSTEP_STANDIN_MEMORY", size_t{1} << 30);
    return Success;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    BEGIN(begin(__func__));
    devices[static_cast<size_t>(device)].retained += 1;
    *context = &devices[static_cast<size_t>(device)];
    return Success;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    BEGIN(begin(__func__));
    if (devices[static_cast<size_t>(device)].retained == 0) return InvalidContext;
    devices[static_cast<size_t>(device)].retained -= 1;
    return Success;
}

int cuCtxSetCurrent(void *context) {
    BEGIN(begin(__func__));
    current = static_cast<Device *>(context);
    return current && current->retained == 0 ? InvalidContext : Success;
}

// Nothing is captured here.
int cuThreadExchangeStreamCaptureMode(int *mode) {
    BEGIN(begin(__func__));
    *mode = 0;
    return Success;
}

int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    BEGIN(begin_in_context(__func__));
    *least = 0;
    *greatest = -5;
    return Success;
}

// Memory.

int cuMemAlloc_v2(uintptr_t *start, size_t len) {
    BEGIN(begin_in_context(__func__));
    return allocate(start, len, current);
}

int cuMemFree_v2(uintptr_t start) {
    BEGIN(begin_in_context(__func__));
    return release(start, true);
}

int cuMemHostAlloc(void **start, size_t len, unsigned) {
    BEGIN(begin_in_context(__func__));
    return allocate(reinterpret_cast<uintptr_t *>(start), len, nullptr);
}

int cuMemFreeHost(void *start) {
    BEGIN(begin_in_context(__func__));
    return release(reinterpret_cast<uintptr_t>(start), false);
}

int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t len, void *stream) {
    Guard guard(lock);
    uintptr_t start = reinterpret_cast<uintptr_t>(from);
    if (holds(start, len, false) == Success) return enqueue(__func__, stream, copy(to, true, start, false, len));
    // Pageable memory: its bytes are taken at once.
    const char *bytes = static_cast<const char *>(from);
    auto taken = std::make_shared<std::vector<char>>(bytes, bytes + len);
    auto fill = [=] {
        if (Result result = holds(to, len, true); result != Success) return result;
        std::memcpy(reinterpret_cast<void *>(to), taken->data(), len);
        return Success;
    };
    return enqueue(__func__, stream, {fill, nullptr, 0, nullptr});
}

int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t len, void *stream) {
    Guard guard(lock);
    uintptr_t start = reinterpret_cast<uintptr_t>(to);
    if (holds(start, len, false) == Success) return enqueue(__func__, stream, copy(start, false, from, true, len));
    // Pageable memory: the call returns when it is filled.
    auto fill = [=] {
        if (Result result = holds(from, len, true); result != Success) return result;
        std::memcpy(to, reinterpret_cast<const void *>(from), len);
        return Success;
    };
    Result result = enqueue(__func__, stream, {fill, nullptr, 0, nullptr});
    if (result != Success) return result;
    return finish(streams[static_cast<Stream *>(stream)]);
}

int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t len, void *stream) {
    Guard guard(lock);
    return enqueue(__func__, stream, copy(to, true, from, true, len));
}

int cuMemsetD8Async(uintptr_t start, unsigned char value, size_t len, void *stream) {
    Guard guard(lock);
    auto set = [=] {
        if (Result result = holds(start, len, true); result != Success) return result;
        std::memset(reinterpret_cast<void *>(start), value, len);
        return Success;
    };
    return enqueue(__func__, stream, {set, nullptr, 0, nullptr});
}

// Streams.

int cuStreamCreateWithPriority(void **stream, unsigned, int) {
    BEGIN(begin_in_context(__func__));
    auto made = std::make_shared<Stream>(Stream{current, {}});
    streams[made.get()] = made;
    *stream = made.get();
    return Success;
}

int cuStreamDestroy_v2(void *handle) {
    BEGIN(begin_in_context(__func__));
    auto stream = streams.find(static_cast<Stream *>(handle));
    if (stream == streams.end()) return InvalidHandle;
    // A device would do the work some time; here somebody has to.
    auto ended = stream->second;
    Result result = finish(ended);
    streams.erase(ended.get());
    return result;
}

int cuStreamSynchronize(void *handle) {
    BEGIN(begin_in_context(__func__));
    ++waits;
    auto stream = streams.find(static_cast<Stream *>(handle));
    if (stream == streams.end()) return InvalidHandle;
    return finish(stream->second);
}

int cuStreamQuery(void *handle) {
    BEGIN(begin_in_context(__func__));
    auto stream = streams.find(static_cast<Stream *>(handle));
    if (stream == streams.end()) return InvalidHandle;
    if (stream->second->queue.empty()) return Success;
    // Who asks again and again sees an end.
    advance();
    return broken != Success ? broken : NotReady;
}

int cuStreamWaitEvent(void *stream, void *handle, unsigned) {
    Guard guard(lock);
    auto event = events.find(static_cast<Event *>(handle));
    if (event == events.end()) return InvalidHandle;
    return enqueue(__func__, stream, {nullptr, event->second, event->second->recorded, nullptr});
}

// Waits until the value is at least this one, as with CU_STREAM_WAIT_VALUE_GEQ; no other comparison.
int cuStreamWaitValue64_v2(void *stream, uintptr_t value, uint64_t least, unsigned flags) {
    Guard guard(lock);
    if (flags != 0 || value % 8 != 0) return InvalidValue;
    return enqueue(__func__, stream, {nullptr, nullptr, least, reinterpret_cast<const volatile uint64_t *>(value)});
}

// As with the driver, the function must not call CUDA.
int cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    Guard guard(lock);
    auto run = [=] {
        function(data);
        return Success;
    };
    return enqueue(__func__, stream, {run, nullptr, 0, nullptr});
}

// Events.

int cuEventCreate(void **event, unsigned) {
    BEGIN(begin_in_context(__func__));
    auto made = std::make_shared<Event>();
    events[made.get()] = made;
    *event = made.get();
    return Success;
}

int cuEventDestroy_v2(void *handle) {
    BEGIN(begin_in_context(__func__));
    return events.erase(static_cast<Event *>(handle)) ? Success : InvalidHandle;
}

int cuEventRecord(void *handle, void *stream) {
    Guard guard(lock);
    auto found = events.find(static_cast<Event *>(handle));
    if (found == events.end()) return InvalidHandle;
    auto event = found->second;
    uint64_t point = event->recorded + 1;
    auto reach = [=] {
        event->reached = point;
        return Success;
    };
    Result result = enqueue(__func__, stream, {reach, nullptr, 0, nullptr});
    if (result == Success) event->recorded = point;
    return result;
}

int cuEventQuery(void *handle) {
    BEGIN(begin_in_context(__func__));
    auto event = events.find(static_cast<Event *>(handle));
    if (event == events.end()) return InvalidHandle;
    if (event->second->reached == event->second->recorded) return Success;
    advance();
    return broken != Success ? broken : NotReady;
}

int cuEventSynchronize(void *handle) {
    BEGIN(begin_in_context(__func__));
    ++waits;
    auto event = events.find(static_cast<Event *>(handle));
    if (event == events.end()) return InvalidHandle;
    auto waited = event->second;
    return advance_until([=] { return waited->reached == waited->recorded; });
}

} // extern "C"
