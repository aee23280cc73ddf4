//! A communicator between processes, for tests: every rank's operations are done by a thread of one process, on loopback, to which it
//! sends its buffers over TCP. A process that ends, or is killed, leaves; for one that stands still the others wait until [`DEADLINE`].

use meshstep_comm::{Action, Communicator, Error, InFlight, Op, Reduction, Stats, Tickets, loopback};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// As long as a rank waits for the others in an operation.
pub(crate) const DEADLINE: Duration = Duration::from_secs(8);

type Wired<T> = std::io::Result<T>;
/// By epoch, then by rank, until they are taken.
type Worlds = Arc<Mutex<BTreeMap<u64, Vec<Option<Arc<dyn Communicator>>>>>>;

/// Serves the ranks of every epoch, until the process ends; where.
pub(crate) fn serve(addr: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind(addr).unwrap();
    let addr = listener.local_addr().unwrap();
    let worlds = Worlds::default();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, worlds) = (stream.unwrap(), Arc::clone(&worlds));
            // It ends when its rank does.
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
    // Calls come one after the other; one that waits for others hears of the end of its process.
    let (calls, called) = std::sync::mpsc::channel();
    let mut incoming = stream.try_clone()?;
    let weak = Arc::downgrade(&seat);
    std::thread::spawn(move || {
        while let Ok(call) = read_call(&mut incoming) {
            let _ = calls.send(call);
        }
        weak.upgrade().iter().for_each(|seat| seat.abort());
    });
    for (op, mut buffer) in called {
        let told = seat.run(op, &mut buffer).map_or_else(|error| error.to_string(), |()| String::new());
        let bytes = if told.is_empty() { buffer.as_slice().bytes().unwrap() } else { told.as_bytes() };
        stream.write_all(&u64::from(told.is_empty()).to_le_bytes())?;
        stream.write_all(&(bytes.len() as u64).to_le_bytes())?;
        stream.write_all(bytes)?;
    }
    Ok(())
}

fn word(stream: &mut TcpStream) -> Wired<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

const TYPES: [DType; 3] = [DType::F32, DType::F64, DType::U64];
const REDUCTIONS: [Reduction; 4] = [Reduction::Sum, Reduction::Mean, Reduction::Max, Reduction::Min];
/// After those: one with a factor, which follows.
const WITH_FACTOR: usize = REDUCTIONS.len();

/// An operation with what it works on; those that local training has between workers.
fn read_call(stream: &mut TcpStream) -> Wired<(Op, Buffer)> {
    let [kind, of, dtype, len] = [word(stream)?, word(stream)?, word(stream)?, word(stream)?];
    let factor = f64::from_bits(word(stream)?);
    let op = match kind {
        0 if of as usize == WITH_FACTOR => Op::all_reduce(Reduction::PreMulSum { factor }),
        0 => Op::all_reduce(REDUCTIONS[of as usize]),
        1 => Op::all_gather(),
        _ => Op::broadcast(of as usize),
    };
    let (dtype, meter) = (TYPES[dtype as usize], Meter::new());
    let mut buffer = Buffer::zeroed(len as usize, dtype, &meter, Category::Staging).unwrap();
    stream.read_exact(buffer.as_mut().bytes_mut().unwrap())?;
    Ok((op, buffer))
}

/// One rank of an epoch, in another process than the ranks' threads.
#[derive(Debug)]
pub(crate) struct Wire {
    rank: usize,
    ranks: usize,
    stream: Mutex<TcpStream>,
    breaks: TcpStream,
    tickets: Arc<Done>,
}

impl Wire {
    pub(crate) fn connect(addr: SocketAddr, epoch: u64, ranks: usize, rank: usize) -> Wired<Self> {
        let mut stream = TcpStream::connect(addr)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        for word in [epoch, ranks as u64, rank as u64] {
            stream.write_all(&word.to_le_bytes())?;
        }
        let breaks = stream.try_clone()?;
        Ok(Wire { rank, ranks, stream: Mutex::new(stream), breaks, tickets: Arc::default() })
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
            other => panic!("{other} is not sent between workers"),
        };
        let dtype = TYPES.iter().position(|dtype| *dtype == buffer.dtype()).unwrap();
        let mut stream = self.stream.lock().unwrap();
        for word in [kind, of, dtype, buffer.len()] {
            stream.write_all(&(word as u64).to_le_bytes())?;
        }
        stream.write_all(&factor.to_bits().to_le_bytes())?;
        stream.write_all(buffer.as_slice().bytes().unwrap())?;
        let (good, len) = (word(&mut stream)? == 1, word(&mut stream)?);
        if good {
            stream.read_exact(buffer.as_mut().bytes_mut().unwrap())?;
            return Ok(Ok(()));
        }
        let mut text = vec![0; len as usize];
        stream.read_exact(&mut text)?;
        Ok(Err(String::from_utf8_lossy(&text).into_owned()))
    }
}

impl Communicator for Wire {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.ranks
    }

    /// Does it while the caller waits.
    fn start(&self, op: Op, mut buffer: Buffer, _after: &Queue) -> Result<InFlight, (Buffer, Error)> {
        let told = self.call(op, &mut buffer).unwrap_or_else(|error| Err(error.to_string()));
        let told = told.map_err(|message| Error::Remote { rank: self.rank, message });
        let ticket = self.tickets.next.fetch_add(1, Relaxed);
        self.tickets.all.lock().unwrap().insert(ticket, (buffer, told));
        Ok(InFlight::new(Arc::clone(&self.tickets) as _, ticket))
    }

    fn split(&self, _: Option<u32>, _: i64) -> Result<Option<Arc<dyn Communicator>>, Error> {
        panic!("workers of one rank have no parts")
    }

    fn abort(&self) {
        // It may have ended already.
        let _ = self.breaks.shutdown(Shutdown::Both);
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.abort();
    }
}

type Ended = (Buffer, Result<(), Error>);

/// What has been done, until it is asked for.
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
