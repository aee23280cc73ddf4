// Device memory of the stand-in: allocations, and control of their accessibility. Call with the lock of driver.h held.
#pragma once

#include "driver.h"

namespace standin {

struct Allocation {
    size_t len;
    Device *device; // null for host memory
};

inline auto &allocations = *new std::map<uintptr_t, Allocation>;

// Returns the allocation that contains `address` or ends there; null if there is none.
const std::pair<const uintptr_t, Allocation> *allocation_at(uintptr_t address);

// Checks that these bytes lie in one live allocation, of a device or of the host.
Result holds(uintptr_t start, size_t len, bool of_device);

// Returns true if a device has reserved the address, allocated or not.
bool is_reserved(uintptr_t address);

// Makes live device memory accessible until the lock is released: a range of one allocation, or all memory of a device.
Result open_memory(uintptr_t start, size_t len);
void open_memory(Device &device);

// Returns true for an address of ordinary host memory, which kernels must not receive.
bool is_pageable(uintptr_t address);

// Installs a handler that prints a line about accesses to closed memory before the process dies.
void report_faults();

} // namespace standin
