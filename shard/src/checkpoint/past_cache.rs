//! Bytes of a file that are read once: what the page cache has of them comes from there, the rest from the disk without going
//! through it. That costs a core less than half as much, and leaves the cache to others.

#[cfg(target_os = "linux")]
use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Fewer bytes than this are read as usual.
#[cfg(target_os = "linux")]
const LARGE: usize = 256 << 10;

/// What offsets, lengths and addresses of a direct read are multiples of: no disk asks for more.
#[cfg(target_os = "linux")]
const BLOCK: usize = 4096;

/// Bytes of a direct read.
#[cfg(target_os = "linux")]
const READ: usize = (1 << 20) + 2 * BLOCK;

/// A file, and the same one opened past the cache where its disk has that.
#[derive(Debug)]
pub(super) struct OnceRead {
    file: File,
    #[cfg(target_os = "linux")]
    direct: Option<File>,
}

impl OnceRead {
    pub(super) fn new(file: File) -> Self {
        #[cfg(target_os = "linux")]
        return OnceRead { direct: direct(&file), file };
        #[cfg(not(target_os = "linux"))]
        return OnceRead { file };
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Fills `bytes` with what is at `offset`; an error where the file ends before.
    pub(super) fn read_past_cache(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        #[cfg(target_os = "linux")]
        if let Some(direct) = &self.direct
            && bytes.len() >= LARGE
        {
            let had = cached(&self.file, offset, bytes);
            let (offset, bytes) = (offset + had as u64, &mut bytes[had..]);
            let read = match bytes.len() >= LARGE {
                true => ROOM.with_borrow_mut(|room| past(direct, offset, bytes, room.aligned())),
                false => return self.file.read_exact_at(bytes, offset),
            };
            return match read {
                // A disk that is particular about more than blocks.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                    self.file.read_exact_at(bytes, offset)
                }
                read => read,
            };
        }
        self.file.read_exact_at(bytes, offset)
    }
}

/// The same file, whatever its name is by now; `None` where the disk knows no such thing.
#[cfg(target_os = "linux")]
fn direct(file: &File) -> Option<File> {
    use rustix::fs::{Mode, OFlags, open};
    use std::os::fd::AsRawFd;
    let same = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
    open(same, flags, Mode::empty()).ok().map(File::from)
}

/// Reads what the page cache has from `offset` on without a gap, and tells how many bytes that are.
#[cfg(target_os = "linux")]
fn cached(file: &File, offset: u64, bytes: &mut [u8]) -> usize {
    use rustix::io::{ReadWriteFlags, preadv2};
    let mut had = 0;
    while had < bytes.len() {
        let mut rest = [io::IoSliceMut::new(&mut bytes[had..])];
        match preadv2(file, &mut rest, offset + had as u64, ReadWriteFlags::NOWAIT) {
            Ok(n) if n > 0 => had += n,
            // Nothing more is there, or the disk cannot tell.
            _ => break,
        }
    }
    had
}

/// Reads through `room`, which begins at a multiple of [`BLOCK`].
#[cfg(target_os = "linux")]
fn past(direct: &File, mut offset: u64, mut bytes: &mut [u8], room: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let skip = (offset % BLOCK as u64) as usize;
        let len = (skip + bytes.len()).next_multiple_of(BLOCK).min(room.len());
        let found = match direct.read_at(&mut room[..len], offset - skip as u64) {
            Ok(found) => found.saturating_sub(skip).min(bytes.len()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if found == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let (part, rest) = bytes.split_at_mut(found);
        part.copy_from_slice(&room[skip..skip + found]);
        (offset, bytes) = (offset + found as u64, rest);
    }
    Ok(())
}

#[cfg(target_os = "linux")]
thread_local! {
    static ROOM: RefCell<Room> = const { RefCell::new(Room(Vec::new())) };
}

/// Memory that direct reads go to.
#[cfg(target_os = "linux")]
struct Room(Vec<u8>);

#[cfg(target_os = "linux")]
impl Room {
    fn aligned(&mut self) -> &mut [u8] {
        self.0.resize(READ + BLOCK, 0);
        let skip = self.0.as_ptr().align_offset(BLOCK);
        &mut self.0[skip..skip + READ]
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
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
