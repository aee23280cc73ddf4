// Random bits as a function of their place: philox.rs. Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3" (2011).

// Elements that share sixteen counters: element 32 w + 2 l + h of a group has half h of word w of counter l.
constexpr u32 LANES = 16, GROUP = 128;
// Elements of a whole tile that a warp has, one after the other.
constexpr u32 PART = 32 * OWNED<float>;

// The bits of one tensor for one vector in one step.
struct Bits {
    u32 key[2];
    u32 place[2];

    // `stream`: 0 for parameters, k + 1 for state k.
    __device__ Bits(const Row& row, u32 stream)
        : key{(u32)row.key, (u32)(row.key >> 32)}, place{(u32)row.t, (u32)(row.t >> 32) << 16 | stream} {}

    __device__ uint4 words(u64 counter) const {
        u32 c0 = (u32)counter, c1 = (u32)(counter >> 32), c2 = place[0], c3 = place[1];
        u32 k0 = key[0], k1 = key[1];
// Unrolled it takes fewer registers than as a loop: keys are constants and one addition.
#pragma unroll
        for (int round = 0; round < 10; round++) {
            u32 low0 = 0xD2511F53u * c0, high0 = __umulhi(0xD2511F53u, c0);
            u32 low1 = 0xCD9E8D57u * c2, high1 = __umulhi(0xCD9E8D57u, c2);
            c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        uint4 words;
        words.x = c0, words.y = c1, words.z = c2, words.w = c3;
        return words;
    }

    // Of one element of the tensor.
    __device__ u32 of(u64 index) const {
        u32 within = (u32)(index % GROUP);
        uint4 x = words(index / GROUP * LANES + within / 2 % LANES);
        u32 word = within < 64 ? within < 32 ? x.x : x.y : within < 96 ? x.z : x.w;
        return word >> within % 2 * 16 & 0xFFFF;
    }

    // Of this thread's elements of a whole tile whose first is `index`. Counters and elements lie across each other, so a warp
    // makes the bits of its part of the tile together: a counter for each thread, and half as many more if the part does not
    // begin with a group.
    __device__ void of_tile(Narrow& random, u64 index) const {
        __shared__ __align__(16) u16 of_block[THREADS / 32][PART + GROUP];
        u16* bits = of_block[threadIdx.x / 32];
        u32 skip = (u32)(index % GROUP);
        u64 first = (index / GROUP + threadIdx.x / 32 * (PART / GROUP)) * LANES;
        u32 counters = (skip + PART + GROUP - 1) / GROUP * LANES;
#pragma unroll 1
        for (u32 c = threadIdx.x % 32; c < counters; c += 32) {
            uint4 x = words(first + c);
            u32* row = (u32*)bits + c / LANES * (GROUP / 2) + c % LANES;
            row[0 * LANES] = x.x, row[1 * LANES] = x.y, row[2 * LANES] = x.z, row[3 * LANES] = x.w;
        }
        __syncwarp();
#pragma unroll
        for (int run = 0; run < 2; run++) {
            const u16* from = bits + skip + run_begin<float>(run) % PART;
            if (skip % 4 == 0) {
                uint2 x = *(const uint2*)from;
                random.w[2 * run] = x.x, random.w[2 * run + 1] = x.y;
            } else {
                random.w[2 * run] = from[0] | (u32)from[1] << 16;
                random.w[2 * run + 1] = from[2] | (u32)from[3] << 16;
            }
        }
        // What is drawn next overwrites the bits.
        __syncwarp();
    }
};
