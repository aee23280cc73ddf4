// Device memory of the stand-in: where it is, and when it is accessible. Under the lock of driver.h.
#pragma once

#include "driver.h"

namespace standin {

struct Allocation {
    size_t len;
    Device *device; // null: of the host
};

inline auto &allocations = *new std::map<uintptr_t, Allocation>;

// The allocation that `address` is in, or just behind; null if there is none.
const std::pair<const uintptr_t, Allocation> *allocation_at(uintptr_t address);

// Whether live memory of a device, or else of the host, has these bytes.
Result holds(uintptr_t start, size_t len, bool of_device);

// Whether a device has reserved the address, whatever is there.
bool is_reserved(uintptr_t address);

// Makes live device memory accessible, until the lock is released: a range of one allocation, or all that a device has.
Result open_memory(uintptr_t start, size_t len);
void open_memory(Device &device);

// An address of ordinary host memory, which no kernel may be given.
bool is_pageable(uintptr_t address);

// Has accesses to closed memory say so before the process dies of them.
void report_faults();

} // namespace standin
