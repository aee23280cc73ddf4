// Modules and launches of the stand-in for the driver.
//
// A module's PTX provides the names of its kernels. The executed code is the same CUDA source compiled for the CPU after
// ../simt/simt.h; it is in the libraries of the folder MESHSTEP_STANDIN_KERNELS. Arguments are copied at the launch, and
// the kernel runs when its stream reaches it. The seed then selects the order of the blocks; in a fraction of the launches
// several blocks are in flight. CUDA_DISABLE_PTX_JIT=1 is honoured.

#include "memory.h"

#include <dirent.h>
#include <dlfcn.h>
#include <set>

using namespace standin;

namespace {

enum : int { ClockRate = 13, MultiprocessorCount = 16, CapabilityMajor = 75, CapabilityMinor = 76, MemoryPools = 115 };
enum : int { LogBuffer = 5, LogSize = 6 };

// Functions exported by simt.h.
using Launch = const char *(*)(const char *name, unsigned grid, unsigned threads, void **args);
using Parameters = int (*)(const char *name, size_t *sizes, int most);
using Shuffle = void (*)(uint64_t seed);
using Interleave = void (*)(unsigned in_flight);

struct Function {
    std::string name;
    Launch launch;
    Shuffle shuffle;
    Interleave interleave;
    std::vector<size_t> sizes;
    Device *device = nullptr;
};

struct Module {
    Device *device;
    std::set<std::string> names;
    std::map<std::string, std::unique_ptr<Function>> functions;
};

auto &launches = *new std::map<std::string, size_t>;
auto &last_grids = *new std::map<std::string, size_t>;
auto &modules = *new std::map<Module *, std::unique_ptr<Module>>;

std::vector<void *> load_all() {
    std::vector<void *> libraries;
    const char *folder = std::getenv("MESHSTEP_STANDIN_KERNELS");
    DIR *entries = folder ? opendir(folder) : nullptr;
    while (dirent *entry = entries ? readdir(entries) : nullptr) {
        std::string name = entry->d_name;
        if (name.size() < 3 || name.substr(name.size() - 3) != ".so") continue;
        void *library = dlopen((std::string(folder) + "/" + name).c_str(), RTLD_NOW | RTLD_LOCAL);
        if (library) libraries.push_back(library);
        else std::fprintf(stderr, "stand-in: %s\n", dlerror());
    }
    if (entries) closedir(entries);
    return libraries;
}

// Loads the kernel from the libraries compiled for the CPU.
std::unique_ptr<Function> compiled(const std::string &name) {
    static std::vector<void *> libraries = load_all();
    for (void *library : libraries) {
        auto parameters = reinterpret_cast<Parameters>(dlsym(library, "simt_parameters"));
        size_t sizes[32];
        int count = parameters ? parameters(name.c_str(), sizes, 32) : -1;
        if (count < 0) continue;
        auto launch = reinterpret_cast<Launch>(dlsym(library, "simt_launch"));
        auto shuffle = reinterpret_cast<Shuffle>(dlsym(library, "simt_shuffle"));
        auto interleave = reinterpret_cast<Interleave>(dlsym(library, "simt_interleave"));
        return std::make_unique<Function>(Function{name, launch, shuffle, interleave, {sizes, sizes + count}});
    }
    return nullptr;
}

// Returns the names after each `.entry` of the text.
std::set<std::string> entries_of(const std::string &text) {
    std::set<std::string> names;
    const std::string mark = ".entry ";
    for (size_t at = text.find(mark); at != std::string::npos; at = text.find(mark, at + 1)) {
        size_t from = at + mark.size(), to = text.find_first_of(" (\t\n", from);
        names.insert(text.substr(from, to - from));
    }
    return names;
}

// Returns the names of a cubin's code sections. A cubin begins with an ELF header, which has the offset of the section
// headers at byte 40 and their number at byte 60.
std::set<std::string> sections_of(const char *cubin) {
    uint64_t headers;
    uint16_t count;
    std::memcpy(&headers, cubin + 40, sizeof headers);
    std::memcpy(&count, cubin + 60, sizeof count);
    constexpr size_t HEADER = 64;
    const std::string all(cubin, headers + count * HEADER), mark = ".text.";
    std::set<std::string> names;
    for (size_t at = all.find(mark); at != std::string::npos; at = all.find(mark, at + 1))
        names.insert(all.c_str() + at + mark.size());
    return names;
}

// Checks one word of a kernel's arguments. If the word is an address that the kernel must not receive on this device,
// returns the kind of memory; else null.
const char *fault_of(uintptr_t word, const Device *device) {
    if (is_pageable(word)) return "pageable host memory";
    if (!is_reserved(word)) return nullptr;
    auto found = allocation_at(word);
    if (!found) return "device memory that is not allocated";
    return found->second.device == device ? nullptr : "memory of another device";
}

using Taken = std::vector<std::vector<char>>;

// Checks every word of the arguments when the kernel's turn comes.
Result check(const Function &function, const Taken &taken) {
    for (size_t i = 0; i < taken.size(); ++i)
        for (size_t at = 0; at + sizeof(uintptr_t) <= taken[i].size(); at += sizeof(uintptr_t)) {
            uintptr_t word;
            std::memcpy(&word, taken[i].data() + at, sizeof word);
            const char *fault = fault_of(word, function.device);
            if (!fault) continue;
            std::fprintf(stderr, "stand-in: %s: byte %zu of argument %zu is an address of %s\n", function.name.c_str(), at,
                         i, fault);
            return IllegalAddress;
        }
    return Success;
}

// One of four launches has 2 to 4 blocks in flight.
unsigned in_flight(uint64_t seed) {
    uint64_t drawn = seed >> 32;
    return drawn % 4 == 0 ? 2 + drawn / 4 % 3 : 1;
}

Result run(const Function &function, unsigned grid, unsigned threads, Taken &taken) {
    if (Result result = check(function, taken); result != Success) return result;
    std::vector<void *> places;
    for (auto &value : taken) places.push_back(value.data());
    open_memory(*function.device);
    uint64_t seed = order() | 2; // not 0, which would end shuffling
    function.shuffle(seed);
    function.interleave(in_flight(seed));
    const char *error = function.launch(function.name.c_str(), grid, threads, places.data());
    if (error) std::fprintf(stderr, "stand-in: %s: %s\n", function.name.c_str(), error);
    return error ? LaunchFailed : Success;
}

bool is_set(const char *name) {
    const char *value = std::getenv(name);
    return value && std::string(value) == "1";
}

void say(const char *message, unsigned count, const int *options, void **values) {
    char *log = nullptr;
    size_t size = 0;
    for (unsigned i = 0; i < count; ++i) {
        if (options[i] == LogBuffer) log = static_cast<char *>(values[i]);
        if (options[i] == LogSize) size = reinterpret_cast<size_t>(values[i]);
    }
    if (log && size) std::snprintf(log, size, "%s", message);
}

} // namespace

extern "C" {

int cuModuleLoadDataEx(void **module, const char *text, unsigned count, const int *options, void **values) {
    BEGIN(begin_in_context(__func__));
    bool machine = std::strncmp(text, "\177ELF", 4) == 0;
    // Driver 580 answers so, and writes nothing into the log.
    if (!machine && !std::strstr(text, ".version ")) return InvalidImage;
    if (!machine && !std::strstr(text, ".target ") && !std::strstr(text, ".entry ")) {
        say("stand-in: the text has no .target", count, options, values);
        return InvalidPtx;
    }
    if (!machine && is_set("CUDA_DISABLE_PTX_JIT")) return JitDisabled;
    auto made = std::make_unique<Module>(Module{current, machine ? sections_of(text) : entries_of(text), {}});
    *module = made.get();
    modules[made.get()] = std::move(made);
    return Success;
}

int cuModuleUnload(void *module) {
    BEGIN(begin_in_context(__func__));
    auto found = modules.find(static_cast<Module *>(module));
    if (found == modules.end() || found->second->device != current) return InvalidHandle;
    Result drained = drain(current);
    modules.erase(found);
    return drained;
}

int cuModuleGetFunction(void **function, void *handle, const char *name) {
    BEGIN(begin_in_context(__func__));
    auto module = modules.find(static_cast<Module *>(handle));
    if (module == modules.end() || module->second->device != current) return InvalidHandle;
    if (!module->second->names.count(name)) return NotFound;
    auto &known = module->second->functions[name];
    if (!known) known = compiled(name);
    if (!known) {
        std::fprintf(stderr, "stand-in: no library of MESHSTEP_STANDIN_KERNELS has the kernel %s\n", name);
        module->second->functions.erase(name);
        return NotFound;
    }
    known->device = module->second->device;
    *function = known.get();
    return Success;
}

int cuLaunchKernel(void *handle, unsigned grid, unsigned grid_y, unsigned grid_z, unsigned threads, unsigned threads_y,
                   unsigned threads_z, unsigned, void *stream, void **args, void **) {
    Guard guard(lock);
    if (grid_y * grid_z * threads_y * threads_z != 1 || grid == 0 || threads == 0 || threads > 1024) return InvalidValue;
    auto *function = static_cast<Function *>(handle);
    if (function->device != current) return InvalidHandle;
    ++launches[function->name];
    last_grids[function->name] = grid;
    Taken taken;
    for (size_t i = 0; i < function->sizes.size(); ++i) {
        const char *from = static_cast<const char *>(args[i]);
        taken.emplace_back(from, from + function->sizes[i]);
    }
    auto work = [=, taken = std::move(taken)]() mutable { return run(*function, grid, threads, taken); };
    return enqueue(__func__, stream, {work, nullptr, 0, nullptr, nullptr}, Needs::ItsContext);
}

size_t meshstep_standin_launches(const char *end) {
    Guard guard(lock);
    std::string last = end;
    size_t count = 0;
    for (auto &[name, launched] : launches)
        if (name.size() >= last.size() && !name.compare(name.size() - last.size(), last.size(), last)) count += launched;
    return count;
}

size_t meshstep_standin_blocks(const char *name) {
    Guard guard(lock);
    auto found = last_grids.find(name);
    return found == last_grids.end() ? 0 : found->second;
}

// The stand-in has no registers; it reports a number that allows two blocks per multiprocessor, as below.
int cuFuncGetAttribute(int *value, int attribute, void *) {
    BEGIN(begin_in_context(__func__));
    enum : int { SharedBytes = 1, LocalBytes = 3, Registers = 4 };
    switch (attribute) {
    case SharedBytes: case LocalBytes: *value = 0; return Success;
    case Registers: *value = 128; return Success;
    default: return InvalidValue;
    }
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *, int, size_t) {
    BEGIN(begin_in_context(__func__));
    *blocks = 2;
    return Success;
}

int cuDeviceGetAttribute(int *value, int attribute, int) {
    BEGIN(begin(__func__));
    switch (attribute) {
    case ClockRate: *value = 1000000; return Success;
    case MultiprocessorCount: *value = 3; return Success;
    case CapabilityMajor: *value = 8; return Success;
    case CapabilityMinor: *value = 0; return Success;
    case MemoryPools: *value = 1; return Success;
    default: return InvalidValue;
    }
}

} // extern "C"
