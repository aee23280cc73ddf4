// Memory: a block takes a tile at a time, and of a whole tile each thread two runs of 16 bytes. Offsets of elements have 64
// bits.
//
// A pair of threads shares four units of 16 bytes, if elements are kept as they are computed with; the even thread has units
// 0 and 2, the odd one 1 and 3. So one access of the pair covers 32 bytes without a gap, the least that memory moves. Of
// 16-bit elements each thread of the pair takes 16 bytes, which are two units of four; the inner two are exchanged.

constexpr u32 THREADS = 256;

// Elements that a thread has of a whole tile, as two runs of half as many.
template <typename T>
constexpr int OWNED = 32 / sizeof(T);

template <typename T>
constexpr u32 TILE = THREADS * OWNED<T>;

// Tiles begin at multiples of this many elements of the flat memory, wherever their row begins: 128 bytes of 16-bit elements.
// So the whole tiles of a row are aligned, and only its first and its last one can be cut.
constexpr u64 ANCHOR = 64;

// Elements `start..start + len` of the flat memory, in the segment of `row`.
struct Tile {
    u64 start;
    u32 len;
};

// Where a tile would begin if its row did not begin in it; behind the row's end if it has no such tile.
template <typename T>
__device__ inline u64 tile_begin(const Row& row, u64 tile) {
    return row.start / ANCHOR * ANCHOR + (tile - row.tile) * TILE<T>;
}

template <typename T>
__device__ inline Tile tile_of(const Row& row, u64 tile) {
    u64 begin = tile_begin<T>(row, tile), end = begin + TILE<T>;
    u64 start = begin < row.start ? row.start : begin, stop = end < row.end ? end : row.end;
    return Tile{start, start < stop ? (u32)(stop - start) : 0};
}

// Where in its tile this thread's run begins.
template <typename T>
__device__ inline u32 run_begin(int run) {
    u32 unit = threadIdx.x / 2 * 4 + threadIdx.x % 2 + (u32)run * 2;
    return unit * (OWNED<T> / 2);
}

// Gives what the other thread of the pair needs, and takes what it gives. Twice is as before.
__device__ inline void exchange(u32 (&w)[4]) {
    bool odd = threadIdx.x % 2;
    u32 a = __shfl_xor_sync(0xFFFFFFFFu, odd ? w[0] : w[2], 1);
    u32 b = __shfl_xor_sync(0xFFFFFFFFu, odd ? w[1] : w[3], 1);
    w[0] = odd ? a : w[0], w[1] = odd ? b : w[1];
    w[2] = odd ? w[2] : a, w[3] = odd ? w[3] : b;
}

__device__ inline void load_16_bytes(u32* w, const void* from) {
    uint4 x = *(const uint4*)from;
    w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
}

__device__ inline void store_16_bytes(const u32* w, void* to) {
    __stwb((uint4*)to, make_uint4(w[0], w[1], w[2], w[3]));
}

// This thread's elements of a whole tile as they are in memory, each a `T`.
template <typename T>
struct Wide {
    u32 w[8];

    __device__ void load(const void* base, u64 start) {
        const T* from = (const T*)base + start;
        load_16_bytes(w, from + run_begin<T>(0));
        load_16_bytes(w + 4, from + run_begin<T>(1));
    }

    __device__ void store(void* base, u64 start) const {
        T* to = (T*)base + start;
        store_16_bytes(w, to + run_begin<T>(0));
        store_16_bytes(w + 4, to + run_begin<T>(1));
    }

    __device__ void get(float& x, int i) const { x = __uint_as_float(w[i]); }
    __device__ void get(double& x, int i) const { x = __hiloint2double((int)w[2 * i + 1], (int)w[2 * i]); }
    __device__ void put(int i, float x) { w[i] = __float_as_uint(x); }
    __device__ void put(int i, double x) {
        u64 bits = (u64)__double_as_longlong(x);
        w[2 * i] = (u32)bits, w[2 * i + 1] = (u32)(bits >> 32);
    }
};

// The same of 16 bits each, where f32 is computed with.
struct Narrow {
    u32 w[4];

    __device__ void load(const void* base, u64 start) {
        load_16_bytes(w, (const u16*)base + start + threadIdx.x * OWNED<float>);
        exchange(w);
    }

    __device__ void store(void* base, u64 start) const {
        u32 given[4] = {w[0], w[1], w[2], w[3]};
        exchange(given);
        store_16_bytes(given, (u16*)base + start + threadIdx.x * OWNED<float>);
    }

    __device__ u32 get(int i) const { return w[i / 2] >> i % 2 * 16 & 0xFFFF; }
    // In order: an even element clears the word, so that nothing of it can be read later.
    __device__ void put(int i, u32 bits) { w[i / 2] = i % 2 ? w[i / 2] | bits << 16 : bits; }
};
