// Sums, factors and sizes of the element types.

#include "state.h"

#include <algorithm>

namespace nccl_standin {

struct Bf16 {
    uint16_t bits;
    Bf16() = default;
    Bf16(float x) {
        uint32_t wide;
        std::memcpy(&wide, &x, 4);
        bool nan = (wide & 0x7fffffff) > 0x7f800000;
        bits = static_cast<uint16_t>(nan ? wide >> 16 | 0x40 : (wide + 0x7fff + (wide >> 16 & 1)) >> 16);
    }
    operator float() const {
        uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float x;
        std::memcpy(&x, &wide, 4);
        return x;
    }
};

// Reduces elements `first..first + count` of all ranks' slots.
template <class T, class Wide>
void reduce(Comm *comm, uint64_t number, size_t first, size_t count, Reduction reduction, char *to) {
    auto value = [&](size_t rank, size_t i) {
        T element;
        std::memcpy(&element, comm->shared->slot(number, rank) + (first + i) * sizeof(T), sizeof(T));
        Wide wide = static_cast<Wide>(element);
        return reduction == Avg ? static_cast<Wide>(wide * (Wide(1) / static_cast<Wide>(comm->world))) : wide;
    };
    for (size_t i = 0; i < count; ++i) {
        Wide result = value(0, i);
        for (size_t rank = 1; rank < comm->world; ++rank) {
            Wide x = value(rank, i);
            result = reduction == Max ? std::max(result, x) : reduction == Min ? std::min(result, x) : result + x;
        }
        T rounded = static_cast<T>(result);
        std::memcpy(to + i * sizeof(T), &rounded, sizeof(T));
    }
}

void reduce(Comm *comm, uint64_t number, size_t first, const Operation &op) {
    switch (op.type) {
    case U64: return reduce<uint64_t, uint64_t>(comm, number, first, op.count, op.reduction, op.to);
    case F16: return reduce<_Float16, float>(comm, number, first, op.count, op.reduction, op.to);
    case F32: return reduce<float, double>(comm, number, first, op.count, op.reduction, op.to);
    case F64: return reduce<double, double>(comm, number, first, op.count, op.reduction, op.to);
    case BF16: return reduce<Bf16, float>(comm, number, first, op.count, op.reduction, op.to);
    }
}

template <class T, class Wide> void multiply(char *values, size_t count, double factor) {
    for (size_t i = 0; i < count; ++i) {
        T element;
        std::memcpy(&element, values + i * sizeof(T), sizeof(T));
        element = static_cast<T>(static_cast<Wide>(element) * static_cast<Wide>(factor));
        std::memcpy(values + i * sizeof(T), &element, sizeof(T));
    }
}

void multiply(Type type, char *values, size_t count, double factor) {
    switch (type) {
    case F16: return multiply<_Float16, float>(values, count, factor);
    case F32: return multiply<float, double>(values, count, factor);
    case F64: return multiply<double, double>(values, count, factor);
    case BF16: return multiply<Bf16, float>(values, count, factor);
    default: return;
    }
}

bool read(Type type, const void *from, double *value) {
    _Float16 half;
    Bf16 bf16;
    float single;
    switch (type) {
    case F16: return std::memcpy(&half, from, 2), *value = double(half), true;
    case BF16: return std::memcpy(&bf16, from, 2), *value = float(bf16), true;
    case F32: return std::memcpy(&single, from, 4), *value = single, true;
    case F64: return std::memcpy(value, from, 8), true;
    default: return false;
    }
}

size_t size_of(int type) {
    switch (type) {
    case F16: case BF16: return 2;
    case F32: return 4;
    case U64: case F64: return 8;
    default: return 0;
    }
}

} // namespace nccl_standin
