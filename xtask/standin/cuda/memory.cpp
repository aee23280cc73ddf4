// Memory of the stand-in for the driver.
//
// Each device has its own range of addresses, initially without access. An allocation takes pages from it, such that the
// allocation ends at a page end, and an inaccessible guard page follows. Freed addresses are reused only after all others.
// Pages are accessible only while the stand-in executes work: a copy opens the bytes that it names, a kernel all memory of
// its device. They are closed before the lock is released and before a host function runs. New memory is filled with 0xA5.
//
// Detected: host code that accesses device memory (SIGSEGV, with a line on stderr); a copy or fill of memory that is freed
// or too short (CUDA_ERROR_ILLEGAL_ADDRESS); a kernel argument, or a word of one, with the address of freed memory, of
// another device's memory, or of pageable host memory (the same error); a kernel that accesses addresses beyond the pages
// of an allocation, or freed or other devices' memory by an address found in memory (SIGSEGV).
//
// Not detected: host code that accesses device memory while another thread executes work on it; a kernel that uses the
// wrong allocation of its device, or bytes of the same pages before the allocation's start or less than 256 past its end; a
// kernel that follows an address of pageable host memory found in device memory.

#include "memory.h"

#include <csignal>
#include <sys/mman.h>
#include <unistd.h>

using namespace standin;

namespace {

const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
constexpr size_t Unit = 256; // alignment of allocations

size_t up(size_t len, size_t to) { return (len + to - 1) / to * to; }

// The pages of an allocation, without the guard page.
uintptr_t first_page(uintptr_t start) { return start / page * page; }
uintptr_t last_page_end(uintptr_t start, size_t len) { return up(start + len, page); }

void protect(uintptr_t from, uintptr_t to, int access) {
    if (mprotect(reinterpret_cast<void *>(from), to - from, access) == 0) return;
    std::perror("stand-in: mprotect");
    std::abort();
}

size_t memory_of_a_device() { return setting("MESHSTEP_STANDIN_MEMORY", size_t{1} << 30); }

// Reserves four times the addresses of the device's memory, so that addresses are rarely reused.
bool reserve(Device &device) {
    if (device.arena) return true;
    size_t len = up(std::max(4 * memory_of_a_device(), size_t{1} << 32), page);
    void *memory = mmap(nullptr, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return false;
    device.arena = device.next = device.high = reinterpret_cast<uintptr_t>(memory);
    device.arena_end = device.arena + len;
    return true;
}

// Returns the end of the last allocation below `end`, including its guard page; 0 if there is none.
uintptr_t end_of_last_below(uintptr_t end) {
    auto next = allocations.lower_bound(end);
    if (next == allocations.begin()) return 0;
    auto &[start, allocation] = *std::prev(next);
    return last_page_end(start, allocation.len) + page;
}

// Returns the address of `bytes` free bytes (whole pages) after the last allocation; 0 if there are none.
uintptr_t place_for(Device &device, size_t bytes) {
    for (int turn = 0; turn < 2; ++turn, device.next = device.arena) {
        uintptr_t at = device.next;
        while (device.arena_end - at >= bytes) {
            uintptr_t taken = end_of_last_below(at + bytes);
            if (taken <= at) {
                device.next = at + bytes;
                device.high = std::max(device.high, device.next);
                return at;
            }
            at = taken;
        }
    }
    return 0;
}

Result allocate_host(uintptr_t *start, size_t len) {
    size_t rounded = up(len, Unit);
    void *memory = rounded < len ? nullptr : std::aligned_alloc(Unit, rounded);
    if (!memory) return OutOfMemory;
    std::memset(memory, 0xA5, rounded);
    *start = reinterpret_cast<uintptr_t>(memory);
    allocations[*start] = {len, nullptr};
    return Success;
}

Result allocate(uintptr_t *start, size_t len, Device &device) {
    if (len > memory_of_a_device() - device.used) return OutOfMemory;
    size_t rounded = up(len, Unit), pages = up(rounded, page);
    uintptr_t at = reserve(device) ? place_for(device, pages + page) : 0;
    if (!at) return OutOfMemory;
    protect(at, at + pages, PROT_READ | PROT_WRITE);
    std::memset(reinterpret_cast<void *>(at), 0xA5, pages);
    protect(at, at + pages, PROT_NONE);
    *start = at + pages - rounded;
    allocations[*start] = {len, &device};
    device.used += len;
    return Success;
}

Result release_now(uintptr_t start) {
    auto allocation = allocations.find(start);
    if (allocation == allocations.end()) return IllegalAddress;
    auto [len, device] = allocation->second;
    allocations.erase(allocation);
    if (!device) {
        std::free(reinterpret_cast<void *>(start));
        return Success;
    }
    device->used -= len;
    uintptr_t from = first_page(start), to = last_page_end(start, len);
    protect(from, to, PROT_NONE);
    madvise(reinterpret_cast<void *>(from), to - from, MADV_DONTNEED);
    return Success;
}

Result release(uintptr_t start, bool of_device) {
    auto allocation = allocations.find(start);
    if (allocation == allocations.end() || (allocation->second.device != nullptr) != of_device) return InvalidValue;
    // Freeing device memory waits for all work of the device; host memory is freed at once, even if a copy still reads it.
    Device *device = allocation->second.device;
    if (of_device) device->frees = std::this_thread::get_id();
    Result drained = of_device ? drain(device) : Success;
    if (of_device) device->frees = {};
    Result freed = release_now(start);
    return drained != Success ? drained : freed;
}

// Makes bytes accessible if they are live memory of a device, or checks them if they are host memory.
Result opened(uintptr_t start, size_t len, bool of_device) {
    return of_device ? open_memory(start, len) : holds(start, len, false);
}

// Returns a copy that checks both ends when its turn comes, as a device would.
Work copy(uintptr_t to, bool to_device, uintptr_t from, bool from_device, size_t len) {
    return {[=] {
                if (opened(to, len, to_device) || opened(from, len, from_device)) return IllegalAddress;
                std::memcpy(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), len);
                return Success;
            },
            nullptr, 0, nullptr, nullptr};
}

struct sigaction before;

// Accesses to device memory print a line, then die of the signal; other faults go to the previous handler.
void on_fault(int number, siginfo_t *info, void *) {
    constexpr char text[] = "stand-in: access to device memory that is closed, freed or past an allocation's end\n";
    bool ours = is_reserved(reinterpret_cast<uintptr_t>(info->si_addr));
    if (ours && write(STDERR_FILENO, text, sizeof text - 1) < 0) _exit(1);
    struct sigaction dies = {};
    dies.sa_handler = SIG_DFL;
    sigaction(number, ours ? &dies : &before, nullptr);
}

} // namespace

namespace standin {

const std::pair<const uintptr_t, Allocation> *allocation_at(uintptr_t address) {
    auto next = allocations.upper_bound(address);
    if (next == allocations.begin()) return nullptr;
    auto found = std::prev(next);
    return address <= found->first + found->second.len ? &*found : nullptr;
}

Result holds(uintptr_t start, size_t len, bool of_device) {
    auto found = allocation_at(start);
    if (!found || len > found->first + found->second.len - start) return IllegalAddress;
    return (found->second.device != nullptr) == of_device ? Success : IllegalAddress;
}

bool is_reserved(uintptr_t address) {
    for (auto &device : devices)
        if (device.arena <= address && address < device.arena_end) return true;
    return false;
}

Result open_memory(uintptr_t start, size_t len) {
    if (Result result = holds(start, len, true); result != Success) return result;
    Device &device = *allocation_at(start)->second.device;
    if (len == 0 || device.open) return Success;
    device.touched = true;
    protect(first_page(start), last_page_end(start, len), PROT_READ | PROT_WRITE);
    return Success;
}

void open_memory(Device &device) {
    if (device.open || !device.arena) return;
    device.touched = device.open = true;
    auto last = allocations.lower_bound(device.arena_end);
    for (auto it = allocations.lower_bound(device.arena); it != last; ++it)
        protect(first_page(it->first), last_page_end(it->first, it->second.len), PROT_READ | PROT_WRITE);
}

void close_memory() {
    for (auto &device : devices) {
        if (!device.touched) continue;
        device.touched = device.open = false;
        protect(device.arena, device.high, PROT_NONE);
    }
}

bool is_pageable(uintptr_t address) {
    // The first pages are never mapped, and user addresses have at most 47 bits.
    if (address < 65536 || address >> 47 || is_reserved(address)) return false;
    if (auto found = allocation_at(address); found && !found->second.device) return false;
    unsigned char resident;
    return mincore(reinterpret_cast<void *>(first_page(address)), page, &resident) == 0;
}

void report_faults() {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &before);
}

} // namespace standin

extern "C" {

// For the stand-in for NCCL, in a host function of a stream: makes device memory accessible until the function has ended.
// An error is sticky, like that of a kernel.
int meshstep_standin_open(uintptr_t start, size_t len) {
    Result result = len == 0 ? Success : open_memory(start, len);
    if (result != Success && broken == Success) broken = result;
    return result;
}

// Counts the memory of this process only; each process has its own stand-in.
int cuMemGetInfo_v2(size_t *free, size_t *total) {
    BEGIN(begin_in_context(__func__));
    *total = memory_of_a_device();
    *free = *total - current->used;
    return Success;
}

int cuMemAlloc_v2(uintptr_t *start, size_t len) {
    BEGIN(begin_in_context(__func__));
    return len == 0 ? InvalidValue : allocate(start, len, *current);
}

int cuMemFree_v2(uintptr_t start) {
    BEGIN(begin_in_context(__func__));
    return release(start, true);
}

// Allocates at once; correctly ordered work cannot detect the difference.
int cuMemAllocAsync(uintptr_t *start, size_t len, void *) {
    BEGIN(begin_in_context(__func__));
    return len == 0 ? InvalidValue : allocate(start, len, *current);
}

// Frees in stream order, so that work of another stream without a wait meets freed memory.
int cuMemFreeAsync(uintptr_t start, void *stream) {
    Guard guard(lock);
    if (holds(start, 0, true) != Success || !allocations.count(start)) return InvalidValue;
    return enqueue(__func__, stream, {[=] { return release_now(start); }, nullptr, 0, nullptr, nullptr});
}

// Returns the location of memory that was allocated here; other memory is unknown to the driver.
int cuPointerGetAttribute(void *value, int attribute, uintptr_t address) {
    BEGIN(begin_in_context(__func__));
    auto found = allocation_at(address);
    if (!found || address == found->first + found->second.len) return InvalidValue;
    auto &allocation = found->second;
    enum : int { MemoryType = 2, DeviceOrdinal = 9 };
    enum : int { Host = 1, OfDevice = 2 };
    switch (attribute) {
    case MemoryType: *static_cast<int *>(value) = allocation.device ? OfDevice : Host; return Success;
    case DeviceOrdinal: *static_cast<int *>(value) = allocation.device ? allocation.device->ordinal : 0; return Success;
    default: return InvalidValue;
    }
}

int cuMemHostAlloc(void **start, size_t len, unsigned) {
    BEGIN(begin_in_context(__func__));
    return len == 0 ? InvalidValue : allocate_host(reinterpret_cast<uintptr_t *>(start), len);
}

int cuMemFreeHost(void *start) {
    BEGIN(begin_in_context(__func__));
    return release(reinterpret_cast<uintptr_t>(start), false);
}

int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t len, void *stream) {
    Guard guard(lock);
    uintptr_t start = reinterpret_cast<uintptr_t>(from);
    if (holds(start, len, false) == Success) return enqueue(__func__, stream, copy(to, true, start, false, len));
    if (is_reserved(start)) return InvalidValue;
    // Pageable memory: the bytes are copied at the call, so a graph cannot capture the copy.
    if (auto found = find(stream); found && found->capture) return spoil(found->capture, CaptureUnsupported);
    const char *bytes = static_cast<const char *>(from);
    auto taken = std::make_shared<std::vector<char>>(bytes, bytes + len);
    auto fill = [=] {
        if (Result result = open_memory(to, len); result != Success) return result;
        std::memcpy(reinterpret_cast<void *>(to), taken->data(), len);
        return Success;
    };
    return enqueue(__func__, stream, {fill, nullptr, 0, nullptr, nullptr});
}

int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t len, void *stream) {
    Guard guard(lock);
    uintptr_t start = reinterpret_cast<uintptr_t>(to);
    if (holds(start, len, false) == Success) return enqueue(__func__, stream, copy(start, false, from, true, len));
    if (is_reserved(start)) return InvalidValue;
    // Pageable memory: the call returns after the copy.
    if (auto found = find(stream); found && found->capture) return spoil(found->capture, CaptureUnsupported);
    auto fill = [=] {
        if (Result result = open_memory(from, len); result != Success) return result;
        std::memcpy(to, reinterpret_cast<const void *>(from), len);
        return Success;
    };
    Result result = enqueue(__func__, stream, {fill, nullptr, 0, nullptr, nullptr});
    if (result != Success) return result;
    return finish(find(stream));
}

int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t len, void *stream) {
    Guard guard(lock);
    return enqueue(__func__, stream, copy(to, true, from, true, len));
}

int cuMemsetD8Async(uintptr_t start, unsigned char value, size_t len, void *stream) {
    Guard guard(lock);
    auto set = [=] {
        if (Result result = open_memory(start, len); result != Success) return result;
        std::memset(reinterpret_cast<void *>(start), value, len);
        return Success;
    };
    return enqueue(__func__, stream, {set, nullptr, 0, nullptr, nullptr}, Needs::ItsContext);
}

} // extern "C"
