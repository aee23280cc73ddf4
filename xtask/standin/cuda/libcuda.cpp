// Stand-in for NVIDIA's libcuda.so.1: the part of the driver that Meshstep calls, on the CPU, for tests only.
//
// Streams are deferred: a call queues its work, and the work runs only when somebody waits, in an order that a seed selects
// among all orders that streams and events allow. So a missing wait gives a wrong result under some seed, as it would
// occasionally on a GPU. `probe()` rejects this library unless MESHSTEP_STANDIN=1.
//
// Device memory is accessible only while work of a stream runs (memory.cpp). As in the driver, objects of a context other
// than the current one are rejected: launches, fills, modules and their functions, events recorded on a stream of another
// device.
//
//   MESHSTEP_STANDIN_DEVICES   number of devices (8)
//   MESHSTEP_STANDIN_MEMORY    bytes of memory of each device (2^30)
//   MESHSTEP_STANDIN_VERSION   driver version to report (13000)
//   MESHSTEP_STANDIN_KERNELS   folder of the kernels compiled for the CPU (see kernels.cpp)
//   meshstep_standin_seed      sets the seed for the order from now on
//   meshstep_standin_fail      makes the next call of a function fail with an error, without effect
//   meshstep_standin_graphs    returns the number of executable graphs
//   meshstep_standin_launches  returns the number of launches of kernels with this suffix
//   meshstep_standin_blocks    returns the number of blocks of the last launch of the kernel with this name, or 0

#include "memory.h"

using namespace standin;

extern "C" {

// Test functions.

int meshstep_standin = 1;

void meshstep_standin_seed(uint64_t seed) {
    Guard guard(lock);
    order.seed(seed);
}

void meshstep_standin_fail(const char *function, int result) {
    Guard guard(lock);
    failures[function] = static_cast<Result>(result);
}

// Driver and devices.

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
    for (size_t i = 0; i < count; ++i) devices.push_back(Device{static_cast<int>(i)});
    report_faults();
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
    if (device < 0 || static_cast<size_t>(device) >= devices.size()) return InvalidDevice;
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

int cuCtxGetCurrent(void **context) {
    BEGIN(begin(__func__));
    *context = current;
    return Success;
}

int cuCtxSynchronize() {
    BEGIN(begin_in_context(__func__));
    for (auto &[_, stream] : streams)
        if (stream->device == current && stream->capture) return spoil(stream->capture, CaptureUnsupported);
    return drain(current);
}

// All captures behave as in relaxed mode.
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

// Streams.

int cuStreamCreateWithPriority(void **stream, unsigned, int) {
    BEGIN(begin_in_context(__func__));
    auto made = std::make_shared<Stream>(Stream{current, {}});
    streams[made.get()] = made;
    *stream = made.get();
    return Success;
}

int cuStreamCreate(void **stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }

int cuStreamDestroy_v2(void *handle) {
    BEGIN(begin_in_context(__func__));
    auto stream = streams.find(static_cast<Stream *>(handle));
    if (stream == streams.end()) return InvalidHandle;
    // The queued work runs now, because nothing else may run it later.
    auto ended = stream->second;
    if (ended->capture) spoil(ended->capture, CaptureInvalidated);
    Result result = finish(ended);
    streams.erase(ended.get());
    return result;
}

int cuStreamSynchronize(void *handle) {
    BEGIN(begin_in_context(__func__));
    auto stream = find(handle);
    if (!stream) return InvalidHandle;
    if (stream->capture) return spoil(stream->capture, CaptureUnsupported);
    return finish(stream);
}

int cuStreamQuery(void *handle) {
    BEGIN(begin_in_context(__func__));
    auto stream = find(handle);
    if (!stream) return InvalidHandle;
    if (stream->capture) return spoil(stream->capture, CaptureUnsupported);
    if (stream->queue.empty()) return Success;
    // Each query makes progress, so that polling ends.
    advance();
    return broken != Success ? broken : NotReady;
}

int cuStreamWaitEvent(void *stream, void *handle, unsigned) {
    Guard guard(lock);
    auto event = events.find(static_cast<Event *>(handle));
    if (event == events.end()) return InvalidHandle;
    auto found = find(stream);
    if (found && (found->capture || event->second->capture)) {
        Result result = begin_in_context(__func__);
        return result == Success ? join(*found, *event->second) : result;
    }
    auto last = event->second->last;
    return enqueue(__func__, stream, {nullptr, last, 0, nullptr, nullptr});
}

// Waits until the value is at least `least`, like CU_STREAM_WAIT_VALUE_GEQ; other comparisons are not supported.
int cuStreamWaitValue64_v2(void *stream, uintptr_t value, uint64_t least, unsigned flags) {
    Guard guard(lock);
    if (flags != 0 || value % 8 != 0) return InvalidValue;
    return enqueue(__func__, stream, {nullptr, nullptr, least, reinterpret_cast<const volatile uint64_t *>(value),
                                    nullptr});
}

// As with the driver, the function must not call CUDA.
int cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    Guard guard(lock);
    auto run = [=] {
        close_memory();
        function(data);
        return Success;
    };
    return enqueue(__func__, stream, {run, nullptr, 0, nullptr, nullptr});
}

// Events.

int cuEventCreate(void **event, unsigned flags) {
    BEGIN(begin_in_context(__func__));
    constexpr unsigned disable_timing = 2;
    auto made = std::make_shared<Event>(Event{current, !(flags & disable_timing)});
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
    auto of = find(stream);
    if (of && of->device != event->device) return InvalidHandle;
    event->capture = of ? of->capture : nullptr;
    if (event->capture) {
        event->after = of->after;
        return begin_in_context(__func__);
    }
    auto record = std::make_shared<Record>();
    auto reach = [=] {
        record->reached = true;
        record->at = std::chrono::steady_clock::now();
        return Success;
    };
    Result result = enqueue(__func__, stream, {reach, nullptr, 0, nullptr, nullptr});
    if (result == Success) event->last = record;
    return result;
}

int cuEventQuery(void *handle) {
    BEGIN(begin_in_context(__func__));
    auto event = events.find(static_cast<Event *>(handle));
    if (event == events.end()) return InvalidHandle;
    if (event->second->capture) return spoil(event->second->capture, CapturedEvent);
    if (!event->second->last || event->second->last->reached) return Success;
    advance();
    return broken != Success ? broken : NotReady;
}

int cuEventSynchronize(void *handle) {
    BEGIN(begin_in_context(__func__));
    auto event = events.find(static_cast<Event *>(handle));
    if (event == events.end()) return InvalidHandle;
    auto waited = event->second;
    if (waited->capture) return spoil(waited->capture, CapturedEvent);
    auto last = waited->last;
    return advance_until([=] { return !last || last->reached; });
}

int cuEventElapsedTime(float *milliseconds, void *from, void *to) {
    BEGIN(begin_in_context(__func__));
    auto start = events.find(static_cast<Event *>(from)), end = events.find(static_cast<Event *>(to));
    if (start == events.end() || end == events.end()) return InvalidHandle;
    if (start->second->device != end->second->device) return InvalidHandle;
    for (auto &event : {start->second, end->second}) {
        if (!event->timed || !event->last) return InvalidHandle;
        if (!event->last->reached) return NotReady;
    }
    *milliseconds = std::chrono::duration<float, std::milli>(end->second->last->at - start->second->last->at).count();
    return Success;
}

} // extern "C"
