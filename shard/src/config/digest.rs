//! Digest of events that all ranks must have in the same order.

/// Mixes one more event into a digest (a multiply and a rotation, as in FxHash: cheap, and order counts).
pub fn digest(so_far: u64, a: u64, b: u64) -> u64 {
    let mix = |h: u64, x: u64| (h.rotate_left(5) ^ x).wrapping_mul(0x517c_c1b7_2722_0a95);
    mix(mix(so_far, a.wrapping_add(1)), b)
}
