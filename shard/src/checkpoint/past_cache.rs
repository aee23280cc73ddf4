//! Bytes of a file that are read once: what the page cache has of them comes from there, the rest from the disk without going
//! through it. That leaves the cache to others.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// A file, whose large reads go past the cache where its disk has that.
#[derive(Debug)]
pub(super) struct OnceRead {
    file: File,
    #[cfg(target_os = "linux")]
    past: std::sync::OnceLock<Option<linux::Past>>,
}

impl OnceRead {
    pub(super) fn new(file: File) -> Self {
        OnceRead {
            file,
            #[cfg(target_os = "linux")]
            past: std::sync::OnceLock::new(),
        }
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Fills `bytes` with what is at `offset`; an error where the file ends before.
    pub(super) fn read_past_cache(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        #[cfg(target_os = "linux")]
        if bytes.len() >= linux::LARGE
            && let Some(past) = self.past.get_or_init(|| linux::Past::of(&self.file))
            && past.read_at(offset, bytes).is_ok()
        {
            return Ok(());
        }
        // What fails here fails for its own sake, and not because a disk is particular.
        self.file.read_exact_at(bytes, offset)
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use rustix::fs::{Advice, Mode, OFlags, fadvise, open};
    use rustix::io::{ReadWriteFlags, preadv2};
    use std::fs::File;
    use std::io::{self, ErrorKind, IoSliceMut};
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;
    use std::sync::{Mutex, PoisonError};

    /// Fewer bytes than this are read as usual.
    pub(super) const LARGE: usize = 256 << 10;

    /// What offsets, lengths and addresses of a direct read are multiples of: no disk asks for more.
    const BLOCK: usize = 4096;

    /// Bytes of a direct read.
    const READ: usize = (1 << 20) + 2 * BLOCK;

    /// The same file opened twice more.
    #[derive(Debug)]
    pub(super) struct Past {
        /// To ask what is in the cache: what is not is not brought there.
        cached: File,
        direct: File,
        /// Where direct reads go to; made by the first.
        room: Mutex<Vec<u8>>,
    }

    impl Past {
        /// `None` where its disk knows no such thing. Whatever the file's name is by now, it is the same file.
        pub(super) fn of(file: &File) -> Option<Self> {
            let same = format!("/proc/self/fd/{}", file.as_raw_fd());
            let again = |flags| open(&*same, flags | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok();
            let (cached, direct) = (again(OFlags::empty())?, again(OFlags::DIRECT)?);
            fadvise(&cached, 0, None, Advice::Random).ok()?;
            Some(Past { cached: cached.into(), direct: direct.into(), room: Mutex::default() })
        }

        pub(super) fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
            let had = self.cached(offset, bytes);
            let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
            room.resize(READ + BLOCK, 0);
            let skip = room.as_ptr().align_offset(BLOCK);
            self.direct(offset + had as u64, &mut bytes[had..], &mut room[skip..skip + READ])
        }

        /// Reads what the cache has from `offset` on without a gap, and tells how many bytes that are. Linux begins to read what it is
        /// asked for and has not: so it is asked for little first.
        pub(super) fn cached(&self, offset: u64, bytes: &mut [u8]) -> usize {
            let (mut had, mut asked) = (0, BLOCK);
            while had < bytes.len() {
                let end = bytes.len().min(had + asked);
                let mut rest = [IoSliceMut::new(&mut bytes[had..end])];
                match preadv2(&self.cached, &mut rest, offset + had as u64, ReadWriteFlags::NOWAIT) {
                    Ok(n) if n > 0 => had += n,
                    // Nothing more is there, or the disk cannot tell.
                    _ => break,
                }
                asked *= 4;
            }
            had
        }

        /// Reads through `room`, which begins at a multiple of [`BLOCK`].
        fn direct(&self, mut offset: u64, mut bytes: &mut [u8], room: &mut [u8]) -> io::Result<()> {
            while !bytes.is_empty() {
                let skip = (offset % BLOCK as u64) as usize;
                let len = (skip + bytes.len()).next_multiple_of(BLOCK).min(room.len());
                let found = match self.direct.read_at(&mut room[..len], offset - skip as u64) {
                    Ok(found) => found.saturating_sub(skip).min(bytes.len()),
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    Err(error) => return Err(error),
                };
                if found == 0 {
                    return Err(ErrorKind::UnexpectedEof.into());
                }
                let (part, rest) = bytes.split_at_mut(found);
                part.copy_from_slice(&room[skip..skip + found]);
                (offset, bytes) = (offset + found as u64, rest);
            }
            Ok(())
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
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
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
                let mut bytes = vec![0; len];
                file.read_past_cache(at as u64, &mut bytes).unwrap();
                assert!(bytes == all[at..at + len], "{len} bytes at {at}, {warm} of them cached");
            }
        }
    }

    #[test]
    fn what_is_not_in_the_cache_does_not_come_there() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
        let mut file = tempfile::tempfile_in(path).unwrap();
        std::io::Write::write_all(&mut file, &vec![7; 4 << 20]).unwrap();
        file.sync_all().unwrap();
        let file = OnceRead::new(file);
        // A disk that has no such reads, as that of some containers.
        let Some(past) = linux::Past::of(file.file()) else { return };
        rustix::fs::fadvise(file.file(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
        (0..4).for_each(|i| file.read_past_cache(i << 20, &mut vec![0; 1 << 20]).unwrap());
        let there = |at: u64| past.cached(at, &mut [0; 4096]) == 4096;
        let blocks = (0..4).flat_map(|i| (8..256).step_by(8).map(move |block| (i << 20) + block * 4096));
        let found = blocks.filter(|&at| there(at)).count();
        assert!(found < 12, "{found} of 124 blocks are there");
    }

    #[test]
    fn what_ends_before_is_an_error() {
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &vec![7; LARGE + 5]).unwrap();
        let file = OnceRead::new(file);
        for (at, len) in [(0, LARGE + 6), (6, LARGE), (1 << 40, LARGE), (LARGE as u64 + 5, 1)] {
            let read = file.read_past_cache(at, &mut vec![0; len]);
            assert_eq!(read.unwrap_err().kind(), io::ErrorKind::UnexpectedEof, "{len} at {at}");
        }
    }
}
