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
//   meshstep_standin_seed      chooses the order from here on
//   meshstep_standin_fail      makes the next call of a function return an error, undone

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

// The driver's numbers.
enum Result : int {
    Success = 0,
    InvalidValue = 1,
    OutOfMemory = 2,
    NotInitialized = 3,
    NoDevice = 100,
    InvalidDevice = 101,
    InvalidContext = 201,
    InvalidHandle = 400,
    NotReady = 600,
    IllegalAddress = 700,
    LaunchTimeout = 702,
};

struct Device {
    int ordinal;
    size_t used = 0;
    int retained = 0;
};

// What was recorded last, and what of it has been reached.
struct Event {
    uint64_t recorded = 0;
    uint64_t reached = 0;
};

struct Stream;

// One piece of work. It can begin once `waits_for` has reached `point`, and once `*value` is at least `point`.
struct Work {
    std::function<Result()> run;
    std::shared_ptr<Event> waits_for;
    uint64_t point = 0;
    const volatile uint64_t *value = nullptr;
};

struct Stream {
    Device *device;
    std::deque<Work> queue;
};

struct Allocation {
    size_t len;
    Device *device; // null: of the host
};

std::mutex lock;
std::mt19937_64 order(1);
bool initialized = false;
std::vector<Device> devices;
std::map<Stream *, std::shared_ptr<Stream>> streams;
std::map<Event *, std::shared_ptr<Event>> events;
std::map<uintptr_t, Allocation> allocations;
std::map<std::string, Result> failures;
Result broken = Success; // an error that stays, as on a device
thread_local Device *current = nullptr;

size_t setting(const char *name, size_t otherwise) {
    const char *text = std::getenv(name);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

// The error that a test has ordered for this function, once.
Result ordered(const char *function) {
    auto failure = failures.find(function);
    if (failure == failures.end()) return Success;
    Result result = failure->second;
    failures.erase(failure);
    return result;
}

Result holds(uintptr_t start, size_t len, bool of_device) {
    auto next = allocations.upper_bound(start);
    if (next == allocations.begin()) return IllegalAddress;
    auto [base, allocation] = *std::prev(next);
    bool inside = start + len <= base + allocation.len && (allocation.device != nullptr) == of_device;
    return inside ? Success : IllegalAddress;
}

bool can_begin(const Stream &stream) {
    if (stream.queue.empty()) return false;
    const Work &work = stream.queue.front();
    if (work.value) return static_cast<int64_t>(__atomic_load_n(work.value, __ATOMIC_ACQUIRE) - work.point) >= 0;
    return !work.waits_for || work.waits_for->reached >= work.point;
}

// Whether some stream waits for a value in memory, which others may write.
bool awaits_a_value() {
    for (auto &[_, stream] : streams)
        if (!stream->queue.empty() && stream->queue.front().value) return true;
    return false;
}

// Does one piece of work of some stream; false if there is none that can begin.
bool advance() {
    std::vector<Stream *> ready;
    for (auto &[_, stream] : streams)
        if (can_begin(*stream)) ready.push_back(stream.get());
    if (ready.empty()) return false;
    Stream *stream = ready[order() % ready.size()];
    Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    Result result = work.run ? work.run() : Success;
    if (broken == Success) broken = result;
    return true;
}

template <class Done> Result advance_until(Done done) {
    while (!done()) {
        if (advance()) continue;
        if (!awaits_a_value()) return LaunchTimeout; // streams that wait for one another
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        lock.lock();
    }
    return broken;
}

Result finish(std::shared_ptr<Stream> stream) {
    return advance_until([=] { return stream->queue.empty(); });
}

Result drain(const Device *device) {
    return advance_until([=] {
        for (auto &[_, stream] : streams)
            if (stream->device == device && !stream->queue.empty()) return false;
        return true;
    });
}

// What every call begins with.
Result begin(const char *function) {
    if (!initialized) return NotInitialized;
    Result failure = ordered(function);
    return failure != Success ? failure : broken;
}

Result begin_in_context(const char *function) {
    Result result = begin(function);
    return result == Success && !current ? InvalidContext : result;
}

Result enqueue(const char *function, void *handle, Work work) {
    Result result = begin_in_context(function);
    if (result != Success) return result;
    auto stream = streams.find(static_cast<Stream *>(handle));
    if (stream == streams.end()) return InvalidHandle;
    stream->second->queue.push_back(std::move(work));
    return Success;
}

// A copy when its turn comes: both ends are looked at then, as a device would.
Work copy(uintptr_t to, bool to_device, uintptr_t from, bool from_device, size_t len) {
    return {[=] {
                if (holds(to, len, to_device) || holds(from, len, from_device)) return IllegalAddress;
                std::memcpy(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), len);
                return Success;
            },
            nullptr, 0, nullptr};
}

Result allocate(uintptr_t *start, size_t len, Device *device) {
    if (len == 0) return InvalidValue;
    if (device && len > setting("MESHSTEP_STANDIN_MEMORY", size_t{1} << 30) - device->used) return OutOfMemory;
    size_t rounded = (len + 255) / 256 * 256;
    void *memory = rounded < len ? nullptr : std::aligned_alloc(256, rounded);
    if (!memory) return OutOfMemory;
    std::memset(memory, 0xA5, rounded);
    *start = reinterpret_cast<uintptr_t>(memory);
    allocations[*start] = {len, device};
    if (device) device->used += len;
    return Success;
}

Result release(uintptr_t start, bool of_device) {
    auto allocation = allocations.find(start);
    if (allocation == allocations.end() || (allocation->second.device != nullptr) != of_device) return InvalidValue;
    // Memory of a device is freed after all its work; the host's at once, whoever still copies from it.
    auto [len, device] = allocation->second;
    Result drained = of_device ? drain(device) : Success;
    if (device) device->used -= len;
    std::free(reinterpret_cast<void *>(start));
    allocations.erase(start);
    return drained;
}

const std::map<int, const char *> names = {
    {Success, "CUDA_SUCCESS"},
    {InvalidValue, "CUDA_ERROR_INVALID_VALUE"},
    {OutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
    {NotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
    {NoDevice, "CUDA_ERROR_NO_DEVICE"},
    {InvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
    {InvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
    {InvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
    {NotReady, "CUDA_ERROR_NOT_READY"},
    {IllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {LaunchTimeout, "CUDA_ERROR_LAUNCH_TIMEOUT"},
};

using Guard = std::lock_guard<std::mutex>;

} // namespace

#define BEGIN(result)                                                                                                  \
    Guard guard(lock);                                                                                                 \
    if (Result begun = result; begun != Success) return begun

extern "C" {

// For tests.

int meshstep_standin = 1;

void meshstep_standin_seed(uint64_t seed) {
    Guard guard(lock);
    order.seed(seed);
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
    auto event = events.find(static_cast<Event *>(handle));
    if (event == events.end()) return InvalidHandle;
    auto waited = event->second;
    return advance_until([=] { return waited->reached == waited->recorded; });
}

} // extern "C"
