// State of the stand-in for the driver, and the execution of its streams. One lock protects all of it.
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

// Error codes of the CUDA driver.
enum Result : int {
    Success = 0,
    InvalidValue = 1,
    OutOfMemory = 2,
    NotInitialized = 3,
    StubLibrary = 34,
    NoDevice = 100,
    InvalidDevice = 101,
    InvalidImage = 200,
    InvalidContext = 201,
    NoBinary = 209,
    InvalidPtx = 218,
    NoJitCompiler = 221,
    UnsupportedPtx = 222,
    JitDisabled = 223,
    InvalidHandle = 400,
    NotFound = 500,
    NotReady = 600,
    IllegalAddress = 700,
    LaunchTimeout = 702,
    LaunchFailed = 719,
    CaptureUnsupported = 900,
    CaptureInvalidated = 901,
    CaptureMerge = 902,
    CaptureUnmatched = 903,
    CaptureUnjoined = 904,
    CaptureIsolation = 905,
    CaptureImplicit = 906,
    CapturedEvent = 907,
};

struct Device {
    int ordinal;
    size_t used = 0;
    int retained = 0;
    // Range of reserved addresses, start of the search for the next allocation, and highest end of all allocations so far.
    uintptr_t arena = 0, arena_end = 0, next = 0, high = 0;
    bool touched = false; // part of the memory is accessible
    bool open = false;    // all allocations are accessible
    std::thread::id frees{}; // the thread whose free of memory waits for the device's work
};

// A node of captured work: an operation, or a wait until `*value` is at least `point`; and the indices of the preceding
// nodes.
struct Node {
    std::function<Result()> run;
    std::vector<size_t> after;
    const volatile uint64_t *value = nullptr;
    uint64_t point = 0;
};

struct Stream;

// A capture, shared by all streams that joined it; `origin` is the stream that began it. `kept` holds objects that are
// released with the capture and its graphs.
struct Capture {
    Stream *origin;
    std::vector<Node> nodes;
    bool spoilt = false;
    std::vector<std::shared_ptr<void>> kept = {};
};

// A point in a stream. Streams that wait for a point do not care what becomes of its event.
struct Record {
    bool reached = false;
    std::chrono::steady_clock::time_point at = {};
};

// An event: its last record. For a captured event, the capture and the nodes that precede the event.
struct Event {
    Device *device;
    bool timed;
    std::shared_ptr<Record> last = nullptr; // none before the first record
    std::shared_ptr<Capture> capture = nullptr;
    std::vector<size_t> after = {};
};

// An executable graph. Its launches run one after the other, even on different streams.
struct Executable {
    std::vector<Node> nodes;
    uint64_t launched = 0;
    uint64_t ended = 0;
    std::vector<std::shared_ptr<void>> kept = {};
};

// One launch of a graph; `number` counts the graph's launches from 0.
struct Launched {
    std::shared_ptr<Executable> graph;
    uint64_t number;
    std::vector<bool> done;
    size_t left;
};

// One operation of a stream. It can begin once `waits_for` is reached, and `*value` is at least `point`.
struct Work {
    std::function<Result()> run;
    std::shared_ptr<Record> waits_for;
    uint64_t point = 0;
    const volatile uint64_t *value = nullptr;
    std::shared_ptr<Launched> launch = nullptr;
};

struct Stream {
    Device *device;
    std::deque<Work> queue;
    std::shared_ptr<Capture> capture = nullptr;
    std::vector<size_t> after = {}; // predecessors of the next captured node
};

// Never destroyed, because threads may call until the process has ended.
inline std::mutex &lock = *new std::mutex;
inline std::mt19937_64 order(1);
inline bool initialized = false;
inline auto &devices = *new std::vector<Device>;
inline auto &streams = *new std::map<Stream *, std::shared_ptr<Stream>>;
inline auto &events = *new std::map<Event *, std::shared_ptr<Event>>;
inline auto &failures = *new std::map<std::string, Result>;
inline Result broken = Success; // a sticky error, as on a device
inline thread_local Device *current = nullptr;

inline size_t setting(const char *name, size_t otherwise) {
    const char *text = std::getenv(name);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

// Returns the error that a test has injected for this function, once.
inline Result ordered(const char *function) {
    auto failure = failures.find(function);
    if (failure == failures.end()) return Success;
    Result result = failure->second;
    failures.erase(failure);
    return result;
}

// Returns the stream of a handle; null is the current device's default stream.
inline std::shared_ptr<Stream> find(void *handle) {
    static auto &own = *new std::map<Device *, std::shared_ptr<Stream>>;
    if (handle) {
        auto stream = streams.find(static_cast<Stream *>(handle));
        return stream == streams.end() ? nullptr : stream->second;
    }
    auto &stream = own[current];
    if (!stream) {
        stream = std::make_shared<Stream>(Stream{current, {}});
        streams[stream.get()] = stream;
    }
    return stream;
}

inline bool is_there(const volatile uint64_t *value, uint64_t point) {
    return !value || static_cast<int64_t>(__atomic_load_n(value, __ATOMIC_ACQUIRE) - point) >= 0;
}

// Returns the nodes of a launch that are next: earlier launches of the graph have ended, and all predecessors are done. A
// node may still wait for a value.
inline std::vector<size_t> due(const Launched &launch) {
    std::vector<size_t> due;
    const auto &nodes = launch.graph->nodes;
    if (launch.graph->ended != launch.number) return due;
    for (size_t i = 0; i < nodes.size(); ++i) {
        bool can = !launch.done[i];
        for (size_t before : nodes[i].after) can = can && launch.done[before];
        if (can) due.push_back(i);
    }
    return due;
}

// Returns those nodes of `due` that can run now.
inline std::vector<size_t> ready(const Launched &launch) {
    std::vector<size_t> ready;
    for (size_t i : due(launch))
        if (is_there(launch.graph->nodes[i].value, launch.graph->nodes[i].point)) ready.push_back(i);
    return ready;
}

inline bool can_begin(const Stream &stream) {
    if (stream.queue.empty()) return false;
    const Work &work = stream.queue.front();
    if (!work.launch) return is_there(work.value, work.point) && (!work.waits_for || work.waits_for->reached);
    bool empty = work.launch->left == 0 && work.launch->graph->ended == work.launch->number;
    return empty || !ready(*work.launch).empty();
}

// Returns true if a stream waits for a value in memory, which another thread or process may write.
inline bool awaits_a_value() {
    for (auto &[_, stream] : streams) {
        if (stream->queue.empty()) continue;
        const Work &work = stream->queue.front();
        if (work.value) return true;
        if (!work.launch) continue;
        for (size_t i : due(*work.launch))
            if (work.launch->graph->nodes[i].value) return true;
    }
    return false;
}

// Runs one node of a graph that can run. Returns false if no node is left.
inline bool advance(Launched &launch, Result &result) {
    std::vector<size_t> pieces = ready(launch);
    if (!pieces.empty()) {
        size_t node = pieces[order() % pieces.size()];
        if (auto &run = launch.graph->nodes[node].run) result = run();
        launch.done[node] = true;
        launch.left -= 1;
    }
    if (launch.left == 0) launch.graph->ended += 1;
    return launch.left > 0;
}

// Runs one operation of some stream. Returns false if no operation can begin.
inline bool advance() {
    std::vector<Stream *> ready;
    for (auto &[_, stream] : streams)
        if (can_begin(*stream)) ready.push_back(stream.get());
    if (ready.empty()) return false;
    Stream *stream = ready[order() % ready.size()];
    Result result = Success;
    Launched *launch = stream->queue.front().launch.get();
    if (!launch || !advance(*launch, result)) {
        Work work = std::move(stream->queue.front());
        stream->queue.pop_front();
        if (work.run) result = work.run();
    }
    if (broken == Success) broken = result;
    return true;
}

// Makes all device memory inaccessible again. Defined in memory.cpp.
void close_memory();

template <class Done> Result advance_until(Done done) {
    while (!done()) {
        if (advance()) continue;
        if (!awaits_a_value()) return LaunchTimeout; // a deadlock between streams
        close_memory();
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        lock.lock();
    }
    return broken;
}

inline Result finish(std::shared_ptr<Stream> stream) {
    return advance_until([=] { return stream->queue.empty(); });
}

// Runs the streams of one device only: a collective on another device may wait for a later call of this thread.
inline Result drain(const Device *device) {
    return advance_until([=] {
        for (auto &[_, stream] : streams)
            if (stream->device == device && !stream->queue.empty()) return false;
        return true;
    });
}

// Checks at the beginning of every call.
inline Result begin(const char *function) {
    if (!initialized) return NotInitialized;
    Result failure = ordered(function);
    return failure != Success ? failure : broken;
}

// A free of device memory holds the context until the device's work is done. On an H200 (driver 580) the destruction of an event
// on another thread waited for it, and queries of events did not. Here every other call in the context waits, too.
inline void wait_for_free(const char *function) {
    if (std::string(function) == "cuEventQuery") return;
    while (current->frees != std::thread::id{} && current->frees != std::this_thread::get_id()) {
        close_memory();
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        lock.lock();
    }
}

inline Result begin_in_context(const char *function) {
    Result result = begin(function);
    if (result != Success) return result;
    if (!current) return InvalidContext;
    wait_for_free(function);
    return broken;
}

// A call that cannot be captured invalidates the capture.
inline Result spoil(const std::shared_ptr<Capture> &capture, Result result) {
    capture->spoilt = true;
    return result;
}

inline Result captured(Stream &stream, Work work) {
    if (stream.capture->spoilt) return CaptureInvalidated;
    if (!work.run && !work.value) return spoil(stream.capture, CaptureUnsupported);
    stream.capture->nodes.push_back({std::move(work.run), stream.after, work.value, work.point});
    stream.after = {stream.capture->nodes.size() - 1};
    return Success;
}

// The stream continues after the event. A stream that is not capturing joins the event's capture.
inline Result join(Stream &stream, const Event &event) {
    auto capture = stream.capture ? stream.capture : event.capture;
    if (capture->spoilt) return CaptureInvalidated;
    if (!event.capture) return spoil(capture, CaptureIsolation);
    if (stream.capture && stream.capture != event.capture) return spoil(capture, CaptureMerge);
    if (!capture->origin) return CapturedEvent; // the capture has ended
    stream.capture = capture;
    stream.after.insert(stream.after.end(), event.after.begin(), event.after.end());
    return Success;
}

// Context requirement of a stream's work. Copies, waits and host functions work in any current context; kernels and fills
// need the stream's context (CUDA Programming Guide, stream and event behavior).
enum class Needs { AnyContext, ItsContext };

inline Result enqueue(const char *function, void *handle, Work work, Needs needs = Needs::AnyContext) {
    Result result = begin_in_context(function);
    if (result != Success) return result;
    auto stream = find(handle);
    if (!stream || (needs == Needs::ItsContext && stream->device != current)) return InvalidHandle;
    if (stream->capture) return captured(*stream, std::move(work));
    stream->queue.push_back(std::move(work));
    return Success;
}

inline const std::map<int, const char *> names = {
    {Success, "CUDA_SUCCESS"},
    {InvalidValue, "CUDA_ERROR_INVALID_VALUE"},
    {OutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
    {NotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
    {StubLibrary, "CUDA_ERROR_STUB_LIBRARY"},
    {NoDevice, "CUDA_ERROR_NO_DEVICE"},
    {InvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
    {InvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
    {InvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
    {NoBinary, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
    {InvalidPtx, "CUDA_ERROR_INVALID_PTX"},
    {NoJitCompiler, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND"},
    {UnsupportedPtx, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"},
    {JitDisabled, "CUDA_ERROR_JIT_COMPILATION_DISABLED"},
    {InvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
    {NotFound, "CUDA_ERROR_NOT_FOUND"},
    {NotReady, "CUDA_ERROR_NOT_READY"},
    {IllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {LaunchTimeout, "CUDA_ERROR_LAUNCH_TIMEOUT"},
    {LaunchFailed, "CUDA_ERROR_LAUNCH_FAILED"},
    {CaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
    {CaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
    {CaptureMerge, "CUDA_ERROR_STREAM_CAPTURE_MERGE"},
    {CaptureUnmatched, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"},
    {CaptureUnjoined, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"},
    {CaptureIsolation, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
    {CaptureImplicit, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"},
    {CapturedEvent, "CUDA_ERROR_CAPTURED_EVENT"},
};

// Holds the lock. Closes device memory that work has opened before it releases the lock.
struct Guard {
    std::lock_guard<std::mutex> held;

    explicit Guard(std::mutex &mutex) : held(mutex) {}
    ~Guard() { close_memory(); }
};

} // namespace standin

#define BEGIN(result)                                                                                                  \
    Guard guard(lock);                                                                                                 \
    if (Result begun = result; begun != Success) return begun
