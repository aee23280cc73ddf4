// A vector in one of its formats: elements one by one, or a thread's part of a whole tile.

// bf16.
template <typename T, u32 FORMAT>
struct Vector {
    Narrow x;

    __device__ static T read(const void* base, const void*, u64 i) { return from_bf16(((const u16*)base)[i]); }
    __device__ static void write(void* base, void*, u64 i, T value) { ((u16*)base)[i] = (u16)to_bf16(value); }

    __device__ void load(const void* base, const void*, u64 start) { x.load(base, start); }
    __device__ void store(void* base, void*, u64 start) const { x.store(base, start); }
    __device__ T get(int i) const { return from_bf16(x.get(i)); }
    __device__ void put(int i, T value) { x.put(i, to_bf16(value)); }
};

template <typename T>
struct Vector<T, F16> {
    Narrow x;

    __device__ static T read(const void* base, const void*, u64 i) { return from_f16(((const u16*)base)[i]); }
    __device__ static void write(void* base, void*, u64 i, T value) { ((u16*)base)[i] = (u16)to_f16(value); }

    __device__ void load(const void* base, const void*, u64 start) { x.load(base, start); }
    __device__ void store(void* base, void*, u64 start) const { x.store(base, start); }
    __device__ T get(int i) const { return from_f16(x.get(i)); }
    __device__ void put(int i, T value) { x.put(i, to_f16(value)); }
};

template <typename T>
struct Vector<T, SAME> {
    Wide<T> x;

    __device__ static T read(const void* base, const void*, u64 i) { return ((const T*)base)[i]; }
    __device__ static void write(void* base, void*, u64 i, T value) { ((T*)base)[i] = value; }

    __device__ void load(const void* base, const void*, u64 start) { x.load(base, start); }
    __device__ void store(void* base, void*, u64 start) const { x.store(base, start); }
    __device__ T get(int i) const {
        T value;
        x.get(value, i);
        return value;
    }
    __device__ void put(int i, T value) { x.put(i, value); }
};

// bf16 halves and remainders.
template <typename T>
struct Vector<T, HALVES> {
    Narrow high, low;

    __device__ static T read(const void* base, const void* second, u64 i) {
        return join(((const u16*)base)[i], ((const u16*)second)[i]);
    }
    __device__ static void write(void* base, void* second, u64 i, T value) {
        u32 nearest = to_bf16(value);
        ((u16*)base)[i] = (u16)nearest;
        ((u16*)second)[i] = (u16)remainder_of(value, nearest);
    }

    __device__ void load(const void* base, const void* second, u64 start) {
        high.load(base, start);
        low.load(second, start);
    }
    __device__ void store(void* base, void* second, u64 start) const {
        high.store(base, start);
        low.store(second, start);
    }
    __device__ T get(int i) const { return join(high.get(i), low.get(i)); }
    __device__ void put(int i, T value) {
        u32 nearest = to_bf16(value);
        high.put(i, nearest);
        low.put(i, remainder_of(value, nearest));
    }
};

// Gradients, in the format that the launch tells.
template <typename T>
struct Grads {
    Wide<T> wide;
    Narrow narrow;

    __device__ static T read(const Streams& s, u64 i) {
        if (s.grads_format == BF16) return Vector<T, BF16>::read(s.grads, nullptr, i);
        if (s.grads_format == F16) return Vector<T, F16>::read(s.grads, nullptr, i);
        return Vector<T, SAME>::read(s.grads, nullptr, i);
    }
    __device__ static void zero(const Streams& s, u64 i) {
        if (s.grads_format == SAME) ((T*)s.grads)[i] = 0;
        else ((u16*)s.grads)[i] = 0;
    }

    __device__ void load(const Streams& s, u64 start) {
        if (s.grads_format == SAME) wide.load(s.grads, start);
        else narrow.load(s.grads, start);
    }
    __device__ static void zero_tile(const Streams& s, u64 start) {
        if (s.grads_format == SAME) Wide<T>{}.store(s.grads, start);
        else Narrow{}.store(s.grads, start);
    }
    __device__ void get_all(T (&g)[OWNED<T>], const Streams& s) const {
#pragma unroll
        for (int i = 0; i < OWNED<T>; i++) {
            if (s.grads_format == BF16) g[i] = from_bf16(narrow.get(i));
            else if (s.grads_format == F16) g[i] = from_f16(narrow.get(i));
            else wide.get(g[i], i);
        }
    }
};

// f64 knows one format.
template <>
struct Grads<double> : Vector<double, SAME> {
    __device__ static double read(const Streams& s, u64 i) { return ((const double*)s.grads)[i]; }
    __device__ static void zero(const Streams& s, u64 i) { ((double*)s.grads)[i] = 0; }
    __device__ void load(const Streams& s, u64 start) { x.load(s.grads, start); }
    __device__ static void zero_tile(const Streams& s, u64 start) { Wide<double>{}.store(s.grads, start); }
    __device__ void get_all(double (&g)[OWNED<double>], const Streams&) const {
#pragma unroll
        for (int i = 0; i < OWNED<double>; i++) g[i] = get(i);
    }
};

// The updated parameters in low precision, to nearest.
__device__ inline void write_copy(const Streams& s, u64 i, float p) {
    if (s.copy) ((u16*)s.copy)[i] = (u16)(s.copy_format == BF16 ? to_bf16(p) : to_f16(p));
}
__device__ inline void write_copy(const Streams&, u64, double) {}

template <u32 FORMAT>
__device__ inline void copy_tile(const Streams& s, u64 start, const float (&p)[OWNED<float>]) {
    Vector<float, FORMAT> copy;
#pragma unroll
    for (int i = 0; i < OWNED<float>; i++) copy.put(i, p[i]);
    copy.store(s.copy, nullptr, start);
}
__device__ inline void copy_tile(const Streams& s, u64 start, const float (&p)[OWNED<float>]) {
    if (!s.copy) return;
    if (s.copy_format == BF16) copy_tile<BF16>(s, start, p);
    else copy_tile<F16>(s, start, p);
}
__device__ inline void copy_tile(const Streams&, u64, const double (&)[OWNED<double>]) {}
