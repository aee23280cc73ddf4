// What the stand-in for the driver knows, and how its streams go on. One lock for all of it.
#pragma once

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

namespace standin {

// The driver's numbers.
enum Result : int {
    Success = 0,
    InvalidValue = 1,
    OutOfMemory = 2,
    NotInitialized = 3,
    NoDevice = 100,
    InvalidDevice = 101,
    InvalidContext = 201,
    InvalidPtx = 218,
    InvalidHandle = 400,
    NotFound = 500,
    NotReady = 600,
    IllegalAddress = 700,
    LaunchTimeout = 702,
    LaunchFailed = 719,
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

// Never destroyed: threads may call until the process has ended.
inline std::mutex &lock = *new std::mutex;
inline std::mt19937_64 order(1);
inline bool initialized = false;
inline auto &devices = *new std::vector<Device>;
inline auto &streams = *new std::map<Stream *, std::shared_ptr<Stream>>;
inline auto &events = *new std::map<Event *, std::shared_ptr<Event>>;
inline auto &allocations = *new std::map<uintptr_t, Allocation>;
inline auto &failures = *new std::map<std::string, Result>;
inline uint64_t waits = 0; // calls of the host that wait for a stream or an event
inline Result broken = Success; // an error that stays, as on a device
inline thread_local Device *current = nullptr;

inline size_t setting(const char *name, size_t otherwise) {
    const char *text = std::getenv(name);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

// The error that a test has ordered for this function, once.
inline Result ordered(const char *function) {
    auto failure = failures.find(function);
    if (failure == failures.end()) return Success;
    Result result = failure->second;
    failures.erase(failure);
    return result;
}

inline Result holds(uintptr_t start, size_t len, bool of_device) {
    auto next = allocations.upper_bound(start);
    if (next == allocations.begin()) return IllegalAddress;
    auto [base, allocation] = *std::prev(next);
    bool inside = start + len <= base + allocation.len && (allocation.device != nullptr) == of_device;
    return inside ? Success : IllegalAddress;
}

inline bool can_begin(const Stream &stream) {
    if (stream.queue.empty()) return false;
    const Work &work = stream.queue.front();
    if (work.value) return static_cast<int64_t>(__atomic_load_n(work.value, __ATOMIC_ACQUIRE) - work.point) >= 0;
    return !work.waits_for || work.waits_for->reached >= work.point;
}

// Whether some stream waits for a value in memory, which others may write.
inline bool awaits_a_value() {
    for (auto &[_, stream] : streams)
        if (!stream->queue.empty() && stream->queue.front().value) return true;
    return false;
}

// Does one piece of work of some stream; false if there is none that can begin.
inline bool advance() {
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

inline Result finish(std::shared_ptr<Stream> stream) {
    return advance_until([=] { return stream->queue.empty(); });
}

// Of one device alone: a collective on another may wait for what this thread has yet to call.
inline Result drain(const Device *device) {
    return advance_until([=] {
        for (auto &[_, stream] : streams)
            if (stream->device == device && !stream->queue.empty()) return false;
        return true;
    });
}

// What every call begins with.
inline Result begin(const char *function) {
    if (!initialized) return NotInitialized;
    Result failure = ordered(function);
    return failure != Success ? failure : broken;
}

inline Result begin_in_context(const char *function) {
    Result result = begin(function);
    return result == Success && !current ? InvalidContext : result;
}

inline Result enqueue(const char *function, void *handle, Work work) {
    Result result = begin_in_context(function);
    if (result != Success) return result;
    auto stream = streams.find(static_cast<Stream *>(handle));
    if (stream == streams.end()) return InvalidHandle;
    stream->second->queue.push_back(std::move(work));
    return Success;
}

// A copy when its turn comes: both ends are looked at then, as a device would.
inline Work copy(uintptr_t to, bool to_device, uintptr_t from, bool from_device, size_t len) {
    return {[=] {
                if (holds(to, len, to_device) || holds(from, len, from_device)) return IllegalAddress;
                std::memcpy(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), len);
                return Success;
            },
            nullptr, 0, nullptr};
}

inline Result allocate(uintptr_t *start, size_t len, Device *device) {
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

inline Result release(uintptr_t start, bool of_device) {
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

inline const std::map<int, const char *> names = {
    {Success, "CUDA_SUCCESS"},
    {InvalidValue, "CUDA_ERROR_INVALID_VALUE"},
    {OutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
    {NotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
    {NoDevice, "CUDA_ERROR_NO_DEVICE"},
    {InvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
    {InvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
    {InvalidPtx, "CUDA_ERROR_INVALID_PTX"},
    {InvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
    {NotFound, "CUDA_ERROR_NOT_FOUND"},
    {NotReady, "CUDA_ERROR_NOT_READY"},
    {IllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {LaunchTimeout, "CUDA_ERROR_LAUNCH_TIMEOUT"},
    {LaunchFailed, "CUDA_ERROR_LAUNCH_FAILED"},
};

using Guard = std::lock_guard<std::mutex>;

} // namespace standin

#define BEGIN(result)                                                                                                  \
    Guard guard(lock);                                                                                                 \
    if (Result begun = result; begun != Success) return begun
