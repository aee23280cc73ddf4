//! One rank as a process: executes the commands of `measure::peers::Group` on its standard input.

use std::array::IntoIter;
use std::fs;
use std::io;
use std::iter::Cycle;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use meshstep_bench_cases::collectives::{Only, operations};
use meshstep_bench_cases::copies::{MemoryPass, PASSES, Pages};
use meshstep_bench_cases::processes::{ReferenceWork, Sockets, Work, serve};
use meshstep_bench_cases::ranks::{OURS, Player};
use meshstep_bench_cases::shapes::even;
use meshstep_bench_cases::step::{Grads, Steps};
use meshstep_comm::Communicator;
use meshstep_comm::rendezvous::Environment;
use meshstep_comm::tcp::{self, Encrypt};
use meshstep_shard::Stage;
use meshstep_tensor::{DType, Threads};
use serde_json::Value;

/// Time for all ranks to meet.
const MEET: Duration = Duration::from_secs(60);

/// Options of the hidden subcommand `rank`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Rank {
    /// Index of this rank
    #[arg(long)]
    rank: usize,
    /// Number of ranks
    #[arg(long)]
    ranks: usize,
    /// Way by which bytes travel
    #[arg(long, value_enum)]
    way: Way,
    /// Folder in which the ranks meet
    #[arg(long, value_name = "DIR")]
    meet: PathBuf,
}

/// Way by which bytes travel between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Way {
    /// A plain program that moves the bytes over sockets
    PlainSockets,
    /// The same, with checksums of all bytes and sums of the contributions
    PlainSocketsWithSums,
    /// Sockets
    Sockets,
    /// Sockets, with the bytes encrypted
    Encrypted,
    /// Shared memory
    SharedMemory,
}

/// Serves commands until the end of the input.
pub(crate) fn run(asked: &Rank) -> Result<()> {
    let mut meetings = 0;
    serve(io::stdin().lock(), io::stdout().lock(), |case| {
        meetings += 1;
        work(asked, case, meetings)
    })
}

/// Prepares a case; each case has connections of its own.
fn work(asked: &Rank, case: &Value, meeting: usize) -> Result<Box<dyn Work>> {
    let plain = match asked.way {
        Way::PlainSockets => ReferenceWork::Moves,
        Way::PlainSocketsWithSums => ReferenceWork::ChecksAndSums,
        _ => return of_communicator(communicator(asked, meeting)?, case),
    };
    let (operation, bytes) = (text(case, "operation")?, number(case, "bytes")?);
    Ok(Box::new(meet(asked, meeting)?.work(operation, bytes, number(case, "times")?, plain)?))
}

/// Prepares a case of this library.
fn of_communicator(comm: Arc<dyn Communicator>, case: &Value) -> Result<Box<dyn Work>> {
    if text(case, "case")? == "passes" {
        let pages = Pages::of_communicator(comm.as_ref(), number(case, "bytes")?)?;
        return Ok(Box::new(PassesOfRank { comm, pages, next: PASSES.into_iter().cycle() }));
    }
    let times = number(case, "times")?;
    if text(case, "case")? == "collective" {
        let (name, len) = (text(case, "operation")?, number(case, "bytes")? / DType::F32.size());
        let named = operations(comm.world_size()).into_iter().position(|(own, ..)| own == name);
        let operation = named.with_context(|| format!("no operation {name}"))?;
        let player = Only::new(Arc::clone(&comm), len, operation)?;
        return Ok(Box::new(OfRank { comm, player, times }));
    }
    let layout = even(number(case, "count")?, number(case, "length")?)?;
    let player = Steps::new(&comm, &[Stage::Zero1], &layout, Grads::There)?;
    Ok(Box::new(OfRank { comm, player, times }))
}

/// A rank that plays its first turn between two barriers.
struct OfRank<P> {
    comm: Arc<dyn Communicator>,
    player: P,
    times: usize,
}

impl<P: Player> Work for OfRank<P> {
    fn run(&mut self) -> Result<f64> {
        self.comm.barrier()?;
        let start = Instant::now();
        (0..self.times).try_for_each(|_| self.player.play(OURS))?;
        self.comm.barrier()?;
        Ok(start.elapsed().as_secs_f64())
    }
}

/// A rank whose runs are reference passes over memory as that of a collective, in the order of [`PASSES`] again and again.
struct PassesOfRank {
    comm: Arc<dyn Communicator>,
    pages: Pages,
    next: Cycle<IntoIter<MemoryPass, 3>>,
}

impl Work for PassesOfRank {
    fn run(&mut self) -> Result<f64> {
        let pass = self.next.next().context("there is no pass")?;
        self.comm.barrier()?;
        let start = Instant::now();
        self.pages.pass(pass, &Threads::caller());
        Ok(start.elapsed().as_secs_f64())
    }
}

fn text<'c>(case: &'c Value, field: &str) -> Result<&'c str> {
    case[field].as_str().with_context(|| format!("{case} has no {field}"))
}

fn number(case: &Value, field: &str) -> Result<usize> {
    let number = case[field].as_u64().with_context(|| format!("{case} has no {field}"))?;
    Ok(usize::try_from(number)?)
}

/// Connects the ranks of the reference, which publish their addresses as files.
fn meet(asked: &Rank, meeting: usize) -> Result<Sockets> {
    let listener = TcpListener::bind("127.0.0.1:0").context("opening a socket")?;
    let own = listener.local_addr()?;
    let file = |rank: usize| asked.meet.join(format!("plain-{meeting}-{rank}"));
    publish(asked, &file(asked.rank), own)?;
    let until = Instant::now() + MEET;
    let addresses = (0..asked.ranks).map(|rank| address(&file(rank), until));
    Sockets::connect(asked.rank, &listener, &addresses.collect::<Result<Vec<_>>>()?)
}

/// Waits for a rank's address.
fn address(file: &Path, until: Instant) -> Result<SocketAddr> {
    loop {
        if let Ok(text) = fs::read_to_string(file) {
            return text.parse().with_context(|| format!("{text} is no address"));
        }
        ensure!(Instant::now() < until, "no address in {} within {MEET:?}", file.display());
        sleep(Duration::from_millis(1));
    }
}

/// Returns this rank's communicator.
fn communicator(asked: &Rank, meeting: usize) -> Result<Arc<dyn Communicator>> {
    let environment = Environment {
        rank: asked.rank,
        world_size: asked.ranks,
        local_rank: asked.rank,
        host: "127.0.0.1".to_owned(),
        port: port(asked, meeting)?,
        run_id: format!("bench {meeting}"),
        restart: 0,
        token: None,
    };
    let encrypt = if asked.way == Way::Encrypted { Encrypt::Always } else { Encrypt::Remote };
    let shared_memory = asked.way == Way::SharedMemory;
    let world = tcp::join(&environment, &tcp::Options { encrypt, shared_memory, ..tcp::Options::default() })?;
    Ok(world.communicator())
}

/// Returns the port of a meeting's store, which rank 0 chooses and publishes as a file.
fn port(asked: &Rank, meeting: usize) -> Result<u16> {
    let file = asked.meet.join(format!("store-{meeting}"));
    if asked.rank == 0 {
        let own = TcpListener::bind("127.0.0.1:0").context("opening a socket")?.local_addr()?;
        publish(asked, &file, own)?;
    }
    Ok(address(&file, Instant::now() + MEET)?.port())
}

/// Writes an address to a file, at once.
fn publish(asked: &Rank, file: &Path, own: SocketAddr) -> Result<()> {
    let draft = asked.meet.join(format!("draft-{}", asked.rank));
    fs::write(&draft, own.to_string()).and_then(|()| fs::rename(&draft, file))?;
    Ok(())
}
