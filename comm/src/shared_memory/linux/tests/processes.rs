//! Ranks as processes, some of which are killed or stopped.

use super::super::MemoryListener;
use super::common::{LONG, Random, read_all, wait_lost, write_all};
use super::throughput::measure;
use crate::p2p::transport::{LostWhy, Source, Target, Transport};
use crate::shared_memory::RingBytes;
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Variable with the role of a process: its rank, and the words of its part.
const ROLE: &str = "MESHSTEP_TEST_SHARED";
const SEED: u64 = 99;

/// Role of a rank. Without the variable it does nothing.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let number = |at: usize| words[at].parse::<usize>().unwrap();
    let (rank, n, part) = (number(0), number(1), words[2]);
    let ring = if part == "measure" { number(3) } else { 1 << 16 };
    let mut transport = meet(rank, n, ring);
    match part {
        "measure" => println!("\nmeasured {}", measure(&mut *transport, number(4))),
        "pour" => pour(&mut *transport),
        "drain" => drain(&mut *transport),
        other => panic!("no part is called {other}"),
    }
}

/// Prints the card, reads all of them, and connects.
fn meet(rank: usize, n: usize, ring: usize) -> Box<dyn Transport> {
    let listener = MemoryListener::open(RingBytes { single: ring, common: ring }).unwrap();
    println!("\ncard {}", listener.card().iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    let cards = (0..n).map(|_| {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
        let digits: Vec<char> = line.trim().chars().collect();
        let byte = |pair: &[char]| u8::from_str_radix(&pair.iter().collect::<String>(), 16).unwrap();
        digits.chunks(2).map(byte).collect()
    });
    let cards: Vec<Vec<u8>> = cards.collect();
    listener.connect(rank, &cards, LONG, || false).unwrap()
}

/// Writes to its audience until it loses one of them.
fn pour(rank: &mut dyn Transport) {
    println!("\npours");
    let mut random = Random::new(SEED);
    loop {
        let bytes = random.bytes(10_000);
        let mut readers = rank.audience().to_vec().into_iter();
        if write_all(rank, Target::Audience, &bytes).is_err()
            || readers.any(|reader| rank.write(Target::Rank(reader), &[]).is_err())
        {
            return;
        }
    }
}

/// Reads what rank 0 pours until it ends, and compares each byte.
fn drain(rank: &mut dyn Transport) {
    let mut random = Random::new(SEED);
    let mut read = vec![0; 10_000];
    let mut pieces = 0;
    let lost = loop {
        let expected = random.bytes(read.len());
        match read_all(rank, Source::Common(0), &mut read) {
            Ok(()) => assert!(read == expected, "piece {pieces}"),
            Err(lost) => break lost,
        }
        pieces += 1;
        if pieces == 30 {
            println!("\nreads");
        }
    };
    println!("\nlost {lost:?}");
}

/// Process of a rank.
pub(super) struct Child {
    process: std::process::Child,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Child {
    fn start(role: &str) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "shared_memory::linux::tests::processes::child", "--nocapture"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        Child { process, input, lines: BufReader::new(output).lines() }
    }

    /// Returns the rest of the next line with this prefix.
    pub(super) fn says(&mut self, prefix: &str) -> String {
        let mut lines = self.lines.by_ref().map(Result::unwrap);
        let line = lines.find_map(|line| line.strip_prefix(prefix).map(str::to_owned));
        line.unwrap_or_else(|| panic!("it ended without saying {prefix:?}"))
    }

    pub(super) fn succeeds(mut self) {
        assert!(self.process.wait().unwrap().success());
    }

    pub(super) fn id(&self) -> u32 {
        self.process.id()
    }

    pub(super) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let id = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(id, signal).unwrap();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Most processes have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts `n` processes with the same part, and gives all cards to all.
pub(super) fn spawn(n: usize, part: &str) -> Vec<Child> {
    introduce((0..n).map(|rank| Child::start(&format!("{rank} {n} {part}"))).collect(), &[])
}

fn introduce(mut children: Vec<Child>, further: &[String]) -> Vec<Child> {
    let cards: Vec<String> = children.iter_mut().map(|child| child.says("card ")).collect();
    for child in &mut children {
        for card in cards.iter().chain(further) {
            writeln!(child.input, "{card}").unwrap();
        }
    }
    children
}

/// Starts a process that pours and `n - 1` that drain, and waits until these read.
pub(super) fn pouring(n: usize) -> Vec<Child> {
    let part = |rank| if rank == 0 { "pour" } else { "drain" };
    let start = |rank| Child::start(&format!("{rank} {n} {}", part(rank)));
    let mut children = introduce((0..n).map(start).collect(), &[]);
    children[1..].iter_mut().for_each(|child| drop(child.says("reads")));
    children
}

#[test]
fn a_killed_process_is_lost_after_its_last_bytes() {
    let mut children = pouring(3);
    let begin = Instant::now();
    children[0].kill();
    for child in &mut children[1..] {
        assert_eq!(child.says("lost "), "Lost { peer: 0, why: Closed }");
    }
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    children.drain(1..).for_each(Child::succeeds);
}

#[test]
fn a_killed_reader_ends_the_common_stream() {
    let mut children = pouring(3);
    children[2].kill();
    // The writer stops at the loss of a reader, and the other reader loses the writer.
    assert_eq!(children[1].says("lost "), "Lost { peer: 0, why: Closed }");
    children.swap_remove(0).succeeds();
}

/// The test is rank 1 of two; rank 0 is stopped and goes on.
#[test]
fn a_wait_for_a_stopped_process_ends_in_time() {
    let listener = MemoryListener::open(RingBytes { single: 1 << 16, common: 1 << 16 }).unwrap();
    let card = listener.card();
    let hex: String = card.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut child = Child::start("0 2 pour");
    let other = child.says("card ");
    let other = (0..other.len()).step_by(2).map(|at| u8::from_str_radix(&other[at..at + 2], 16).unwrap());
    let cards = [other.collect(), card];
    for card in &cards {
        let line: String = card.iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(child.input, "{line}").unwrap();
    }
    assert_eq!(hex.len(), 66);
    let mut rank = listener.connect(1, &cards, LONG, || false).unwrap();
    child.says("pours");
    child.signal(rustix::process::Signal::STOP);
    // Earlier bytes end some waits.
    let begin = Instant::now();
    let mut longest = Duration::ZERO;
    while begin.elapsed() < Duration::from_secs(1) {
        let arrived = rank.arrived(Source::Common(0)).len();
        rank.consume(Source::Common(0), arrived);
        let begin = Instant::now();
        rank.wait(Duration::from_millis(100)).unwrap();
        longest = longest.max(begin.elapsed());
    }
    assert!((Duration::from_millis(100)..Duration::from_secs(1)).contains(&longest), "{longest:?}");
    child.signal(rustix::process::Signal::CONT);
    let mut read = vec![0; 200_000];
    read_all(&mut *rank, Source::Common(0), &mut read).unwrap();
    child.kill();
    let lost = loop {
        let arrived = rank.arrived(Source::Common(0)).len();
        rank.consume(Source::Common(0), arrived);
        if arrived == 0 {
            break wait_lost(&mut *rank).0;
        }
    };
    assert_eq!((lost.peer, lost.why), (0, LostWhy::Closed));
}
