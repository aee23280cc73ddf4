//! Reads of bytes that are needed once: cached bytes come from the page cache, the others from the disk with direct reads that leave the
//! cache to other data.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// File with large reads that bypass the page cache where its disk supports that.
#[derive(Debug)]
pub(crate) struct OnceRead {
    file: File,
    #[cfg(target_os = "linux")]
    past: std::sync::OnceLock<Option<linux::Past>>,
}

impl OnceRead {
    pub(crate) fn new(file: File) -> Self {
        OnceRead {
            file,
            #[cfg(target_os = "linux")]
            past: std::sync::OnceLock::new(),
        }
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Reads the `len` bytes at `offset` to some place in `room`; an error if the file ends earlier. Direct reads need a room of `len` plus
    /// [`SLACK`] bytes; on huge pages they are half again as fast.
    pub(crate) fn read_past_cache<'r>(
        &self,
        offset: u64,
        len: usize,
        room: &'r mut [u8],
    ) -> io::Result<&'r [u8]> {
        #[cfg(target_os = "linux")]
        if len >= linux::LARGE
            && let Some(past) = self.past.get_or_init(|| linux::Past::of(&self.file))
            && let Some(place) = past.read_at(offset, len, room)
        {
            return Ok(&room[place]);
        }
        // Read as usual; an error here is not one of direct reads alone.
        let bytes = &mut room[..len];
        self.file.read_exact_at(bytes, offset)?;
        Ok(bytes)
    }
}

/// Alignment of offsets, lengths and addresses of direct reads; no disk asks for more.
const BLOCK: usize = 4096;

/// Additional bytes of a room for direct reads, up to a block each: to align the room, before the first byte in its block, and behind the
/// last byte.
pub(crate) const SLACK: usize = 3 * BLOCK;

#[cfg(target_os = "linux")]
mod linux {
    use super::BLOCK;
    use rustix::fs::{Advice, Mode, OFlags, fadvise, open};
    use rustix::io::{ReadWriteFlags, preadv2};
    use std::fs::File;
    use std::io::{ErrorKind, IoSliceMut};
    use std::ops::Range;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;

    /// Length in bytes from which reads may bypass the cache.
    pub(crate) const LARGE: usize = 256 << 10;

    /// The same file, opened twice more.
    #[derive(Debug)]
    pub(crate) struct Past {
        /// For queries of the cache, with read-ahead off, so that they do not fill it.
        cached: File,
        direct: File,
    }

    impl Past {
        /// Returns `None` if the disk has no direct reads. Opens the same file even if it was renamed or removed.
        pub(crate) fn of(file: &File) -> Option<Self> {
            let same = format!("/proc/self/fd/{}", file.as_raw_fd());
            let again = |flags| open(&*same, flags | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok();
            let (cached, direct) = (again(OFlags::empty())?, again(OFlags::DIRECT)?);
            fadvise(&cached, 0, None, Advice::Random).ok()?;
            Some(Past { cached: cached.into(), direct: direct.into() })
        }

        /// Reads to an aligned place in `room`, and returns that place; `None` if the room or the file is too short, or the disk refuses.
        pub(crate) fn read_at(&self, offset: u64, len: usize, room: &mut [u8]) -> Option<Range<usize>> {
            let before = (offset % BLOCK as u64) as usize;
            let first = room.as_ptr().align_offset(BLOCK).checked_add(before)?;
            let all = first..first.checked_add(len)?;
            let had = self.cached(offset, room.get_mut(all.clone())?);
            if had == len {
                return Some(all);
            }
            // Read from the block with the first byte that is not cached to the block with the last byte.
            let mut at = (before + had) / BLOCK * BLOCK + first - before;
            let end = (before + len).next_multiple_of(BLOCK) + first - before;
            while at < all.end {
                let from = offset + at as u64 - first as u64;
                match self.direct.read_at(room.get_mut(at..end)?, from) {
                    Ok(found) if at + found >= all.end => break,
                    Ok(found) if found > 0 && found % BLOCK == 0 => at += found,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    _ => return None,
                }
            }
            Some(all)
        }

        /// Reads cached bytes from `offset` on up to the first gap, and returns their number. Linux starts to read bytes that it was asked
        /// for and has not cached, so the first request is small.
        pub(crate) fn cached(&self, offset: u64, bytes: &mut [u8]) -> usize {
            let (mut had, mut asked) = (0, BLOCK);
            while had < bytes.len() {
                let end = bytes.len().min(had.saturating_add(asked));
                let mut rest = [IoSliceMut::new(&mut bytes[had..end])];
                match preadv2(&self.cached, &mut rest, offset + had as u64, ReadWriteFlags::NOWAIT) {
                    Ok(n) if n > 0 => had += n,
                    // No further byte is cached, or the disk cannot tell.
                    _ => break,
                }
                asked = asked.saturating_mul(4);
            }
            had
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::linux::LARGE;
    use super::*;
    use std::fs;

    /// Odd lengths and places, with nothing of the file cached, a part of it, and all.
    #[test]
    fn bytes_are_the_files_wherever_they_come_from() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
        fs::create_dir_all(&path).unwrap();
        let dir = tempfile::tempdir_in(path).unwrap();
        let path = dir.path().join("file");
        let all: Vec<u8> =
            (0..(3 << 20) + 777_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        fs::write(&path, &all).unwrap();
        let file = OnceRead::new(File::open(&path).unwrap());
        file.file().sync_all().unwrap();
        let largest = all.len();
        let places = [
            (0, largest),
            (1, LARGE),
            (4095, 1 << 20),
            (4096, LARGE),
            (777, 2 << 20),
            (largest - LARGE, LARGE),
        ];
        for warm in [0, 1 << 20, largest] {
            for (at, len) in
                places.into_iter().chain([(5, 100), (largest - 3, 3), (largest - LARGE - 1, LARGE)])
            {
                rustix::fs::fadvise(file.file(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
                file.file().read_exact_at(&mut vec![0; warm], 0).unwrap();
                for slack in [0, SLACK] {
                    let mut room = vec![0; len + slack];
                    let bytes = file.read_past_cache(at as u64, len, &mut room).unwrap();
                    assert!(bytes == &all[at..at + len], "{len} bytes at {at}, {warm} of them cached");
                }
            }
        }
    }

    #[test]
    fn what_is_not_in_the_cache_does_not_come_on_gpu() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
        let mut file = tempfile::tempfile_in(path).unwrap();
        std::io::Write::write_all(&mut file, &vec![7; 4 << 20]).unwrap();
        file.sync_all().unwrap();
        let file = OnceRead::new(file);
        // The disk, as in some containers, has no direct reads.
        let Some(past) = linux::Past::of(file.file()) else { return };
        let mut room = vec![0; (1 << 20) + SLACK];
        let there = |at: u64| past.cached(at, &mut [0; 4096]) == 4096;
        let mut found = || {
            rustix::fs::fadvise(file.file(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
            (0..4)
                .for_each(|i| assert_eq!(file.read_past_cache(i << 20, 1 << 20, &mut room).unwrap()[77], 7));
            let blocks = (0..4).flat_map(|i| (8..256).step_by(8).map(move |block| (i << 20) + block * 4096));
            blocks.filter(|&at| there(at)).count()
        };
        // A busy system may keep dropped pages for a while. Pages that the reads cache appear every time.
        let mut counts = Vec::new();
        while counts.len() < 10 && counts.last().is_none_or(|&count| count >= 12) {
            std::thread::sleep(std::time::Duration::from_millis(20 * counts.len() as u64));
            counts.push(found());
        }
        assert!(counts.last().is_some_and(|&count| count < 12), "of 124 blocks are there: {counts:?}");
    }

    #[test]
    fn what_ends_before_is_an_error() {
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &vec![7; LARGE + 5]).unwrap();
        let file = OnceRead::new(file);
        for (at, len) in [(0, LARGE + 6), (6, LARGE), (1 << 40, LARGE), (LARGE as u64 + 5, 1)] {
            let mut room = vec![0; len + SLACK];
            let read = file.read_past_cache(at, len, &mut room);
            assert_eq!(read.unwrap_err().kind(), io::ErrorKind::UnexpectedEof, "{len} at {at}");
        }
    }
}
