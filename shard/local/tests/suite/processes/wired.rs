//! A communicator between processes, for tests. Each rank sends its buffers over TCP to one process, where a thread per rank runs
//! the operations on loopback. A process that ends, or is killed, leaves; the others wait for one that stands still until
//! [`DEADLINE`].

use meshstep_comm::{Action, Communicator, Error, InFlight, Op, Reduction, Stats, Tickets, loopback};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Longest wait of a rank for the others in an operation.
pub(crate) const DEADLINE: Duration = Duration::from_secs(8);

type Wired<T> = std::io::Result<T>;
/// Communicators by epoch, then by rank, until they are taken.
type Worlds = Arc<Mutex<BTreeMap<u64, Vec<Option<Arc<dyn Communicator>>>>>>;

/// Serves the ranks of every epoch until the process ends, and returns the address.
pub(crate) fn serve(addr: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind(addr).unwrap();
    let addr = listener.local_addr().unwrap();
    let worlds = Worlds::default();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, worlds) = (stream.unwrap(), Arc::clone(&worlds));
            // The thread ends with its rank.
            std::thread::spawn(move || drop(serve_rank(stream, &worlds)));
        }
    });
    addr
}

fn serve_rank(mut stream: TcpStream, worlds: &Worlds) -> Wired<()> {
    let [epoch, ranks, rank] = [word(&mut stream)?, word(&mut stream)?, word(&mut stream)?];
    let config = loopback::Config { timeout: DEADLINE, ..loopback::Config::new(ranks as usize) };
    let make = || loopback::world(config).unwrap().into_iter().map(Some).collect();
    let seat = worlds.lock().unwrap().entry(epoch).or_insert_with(make)[rank as usize].take().unwrap();
    // Calls run one after the other; while one waits, this thread notices the end of the process.
    let (calls, called) = std::sync::mpsc::channel();
    let mut incoming = stream.try_clone()?;
    let weak = Arc::downgrade(&seat);
    std::thread::spawn(move || {
        while let Ok(call) = read_call(&mut incoming) {
            let _ = calls.send(call);
        }
        weak.upgrade().iter().for_each(|seat| seat.abort());
    });
    // The communicator of all ranks, and those split from it.
    let mut parts = vec![seat];
    for (part, call) in called {
        let told = match call {
            Call::Run(op, mut buffer) => parts[part]
                .run(op, &mut buffer)
                .map(|()| buffer.as_slice().bytes().unwrap().to_vec())
                .map_err(|error| error.to_string()),
            Call::Split(colour, key) => {
                split(&mut parts, part, colour, key).map_err(|error| error.to_string())
            }
        };
        let bytes = told.as_ref().map_or_else(|error| error.as_bytes(), |bytes| &bytes[..]);
        stream.write_all(&u64::from(told.is_ok()).to_le_bytes())?;
        stream.write_all(&(bytes.len() as u64).to_le_bytes())?;
        stream.write_all(bytes)?;
    }
    Ok(())
}

/// Splits a communicator, and returns the index, rank and size of the new one; nothing if this rank is in none.
fn split(
    parts: &mut Vec<Arc<dyn Communicator>>,
    of: usize,
    colour: Option<u32>,
    key: i64,
) -> Result<Vec<u8>, Error> {
    let Some(part) = parts[of].split(colour, key)? else { return Ok(Vec::new()) };
    let words = [parts.len(), part.rank(), part.world_size()];
    parts.push(part);
    Ok(words.iter().flat_map(|&word| (word as u64).to_le_bytes()).collect())
}

/// Request of a rank.
enum Call {
    Run(Op, Buffer),
    Split(Option<u32>, i64),
}

fn word(stream: &mut TcpStream) -> Wired<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

const TYPES: [DType; 3] = [DType::F32, DType::F64, DType::U64];
const REDUCTIONS: [Reduction; 4] = [Reduction::Sum, Reduction::Mean, Reduction::Max, Reduction::Min];
/// Code of the reduction with a factor, which follows.
const WITH_FACTOR: usize = REDUCTIONS.len();

/// Code of a split, with the colour plus 1 as the root, and the key in place of the factor.
const SPLIT: u64 = 3;

/// Reads the index of a communicator and an operation with its buffer; only operations that local training uses between workers.
fn read_call(stream: &mut TcpStream) -> Wired<(usize, Call)> {
    let part = word(stream)? as usize;
    let [kind, of, dtype, len] = [word(stream)?, word(stream)?, word(stream)?, word(stream)?];
    let bits = word(stream)?;
    if kind == SPLIT {
        return Ok((part, Call::Split((of as u32).checked_sub(1), bits as i64)));
    }
    let factor = f64::from_bits(bits);
    let op = match kind {
        0 if of as usize == WITH_FACTOR => Op::all_reduce(Reduction::PreMulSum { factor }),
        0 => Op::all_reduce(REDUCTIONS[of as usize]),
        1 => Op::all_gather(),
        4 => Op::barrier(),
        _ => Op::broadcast(of as usize),
    };
    let (dtype, meter) = (TYPES[dtype as usize], Meter::new());
    let mut buffer = Buffer::zeroed(len as usize, dtype, &meter, Category::Staging).unwrap();
    stream.read_exact(buffer.as_mut().bytes_mut().unwrap())?;
    Ok((part, Call::Run(op, buffer)))
}

/// One rank of an epoch, in another process than the threads that run the operations.
#[derive(Debug)]
pub(crate) struct Wire {
    rank: usize,
    ranks: usize,
    /// Index of the communicator; 0 has all ranks.
    part: usize,
    line: Arc<Line>,
    tickets: Arc<Done>,
}

/// Connection of a rank, shared by its communicators. It ends with the last of them.
#[derive(Debug)]
struct Line {
    stream: Mutex<TcpStream>,
    breaks: TcpStream,
}

impl Line {
    fn end(&self) {
        // The connection may have ended already.
        let _ = self.breaks.shutdown(Shutdown::Both);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.end();
    }
}

impl Wire {
    pub(crate) fn connect(addr: SocketAddr, epoch: u64, ranks: usize, rank: usize) -> Wired<Self> {
        let mut stream = TcpStream::connect(addr)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        for word in [epoch, ranks as u64, rank as u64] {
            stream.write_all(&word.to_le_bytes())?;
        }
        let breaks = stream.try_clone()?;
        let line = Arc::new(Line { stream: Mutex::new(stream), breaks });
        Ok(Wire { rank, ranks, part: 0, line, tickets: Arc::default() })
    }

    fn ask(&self, words: [u64; 5], bytes: &[u8]) -> Wired<Result<Vec<u8>, String>> {
        let mut stream = self.line.stream.lock().unwrap();
        for word in [self.part as u64].into_iter().chain(words) {
            stream.write_all(&word.to_le_bytes())?;
        }
        stream.write_all(bytes)?;
        let (good, len) = (word(&mut stream)? == 1, word(&mut stream)?);
        let mut told = vec![0; len as usize];
        stream.read_exact(&mut told)?;
        Ok(if good { Ok(told) } else { Err(String::from_utf8_lossy(&told).into_owned()) })
    }

    fn call(&self, op: Op, buffer: &mut Buffer) -> Wired<Result<(), String>> {
        let mut factor = 1f64;
        let (kind, of) = match op.action() {
            Action::AllReduce(Reduction::PreMulSum { factor: own }) => {
                factor = own;
                (0, WITH_FACTOR)
            }
            Action::AllReduce(reduction) => (0, REDUCTIONS.iter().position(|r| *r == reduction).unwrap()),
            Action::AllGather => (1, 0),
            Action::Broadcast { root } => (2, root),
            Action::Barrier => (4, 0),
            other => panic!("{other} is not sent between workers"),
        };
        let dtype = TYPES.iter().position(|dtype| *dtype == buffer.dtype()).unwrap();
        let [kind, of, dtype, len] = [kind, of, dtype, buffer.len()].map(|word| word as u64);
        let told = self.ask([kind, of, dtype, len, factor.to_bits()], buffer.as_slice().bytes().unwrap())?;
        Ok(told.map(|bytes| buffer.as_mut().bytes_mut().unwrap().copy_from_slice(&bytes)))
    }
}

impl Communicator for Wire {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.ranks
    }

    /// Runs the operation while the caller waits.
    fn start(&self, op: Op, mut buffer: Buffer, _after: &Queue) -> Result<InFlight, (Buffer, Error)> {
        let told = self.call(op, &mut buffer).unwrap_or_else(|error| Err(error.to_string()));
        let told = told.map_err(|message| Error::Remote { rank: self.rank, message });
        let ticket = self.tickets.next.fetch_add(1, Relaxed);
        self.tickets.all.lock().unwrap().insert(ticket, (buffer, told));
        Ok(InFlight::new(Arc::clone(&self.tickets) as _, ticket))
    }

    fn split(&self, colour: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>, Error> {
        let of = colour.map_or(0, |colour| u64::from(colour) + 1);
        let told = self.ask([SPLIT, of, 0, 0, key as u64], &[]);
        let told = told.unwrap_or_else(|error| Err(error.to_string()));
        let told = told.map_err(|message| Error::Remote { rank: self.rank, message })?;
        let (words, _) = told.as_chunks::<8>();
        let [part, rank, ranks] = words else { return Ok(None) };
        let [part, rank, ranks] = [part, rank, ranks].map(|word| u64::from_le_bytes(*word) as usize);
        let (line, tickets) = (Arc::clone(&self.line), Arc::default());
        Ok(Some(Arc::new(Wire { rank, ranks, part, line, tickets })))
    }

    fn abort(&self) {
        self.line.end();
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }
}

type Ended = (Buffer, Result<(), Error>);

/// Finished operations, until they are collected.
#[derive(Debug, Default)]
struct Done {
    next: AtomicUsize,
    all: Mutex<BTreeMap<usize, Ended>>,
}

impl Tickets for Done {
    fn redeem(&self, ticket: usize, _: &Queue) -> (Buffer, Result<(), Error>) {
        self.all.lock().unwrap().remove(&ticket).unwrap()
    }

    fn is_done(&self, _: usize) -> bool {
        true
    }

    fn ends_within(&self, _: usize, _: Duration) -> bool {
        true
    }

    fn forget(&self, ticket: usize) {
        self.all.lock().unwrap().remove(&ticket);
    }
}
