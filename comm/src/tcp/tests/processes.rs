//! Ranks as processes that are killed and stopped.

use super::common::{Bytes, Exchange, HEX, LONG, free_addr, options};
use crate::p2p::transport::{Source, Target};
use crate::rendezvous::Environment;
use crate::tcp::Encrypt;
use crate::tcp::meeting::{WorldStreams, meet};
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Variable with the role of this binary, if it runs as a rank.
const ROLE: &str = "MESHSTEP_TEST_ROLE";
/// Longest call that blocks nothing; machines of tests are slow.
const SHORT: Duration = Duration::from_secs(1);

/// Rank of another test. Without the variable it does nothing.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let encrypt = if role.contains("sealed") { Encrypt::Always } else { Encrypt::Remote };
    let before = counts();
    let mut world = meet(&Environment::from_env().unwrap(), &options(encrypt)).unwrap();
    println!("\nready");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    match &role {
        role if role.contains("flow") => flow(&mut world),
        _ => exchange(&mut world),
    }
    std::io::stdin().read_line(&mut line).unwrap();
    drop(world);
    // A joined thread is listed until the system has removed it.
    let begin = Instant::now();
    while counts() != before {
        assert!(begin.elapsed() < 5 * SHORT, "{:?} threads and files, not {before:?}", counts());
        std::thread::sleep(Duration::from_millis(5));
    }
    println!("\nnothing is left");
}

/// Returns the numbers of threads and of open files of this process.
fn counts() -> [usize; 2] {
    ["task", "fd"].map(|kind| std::fs::read_dir(format!("/proc/self/{kind}")).map_or(0, Iterator::count))
}

/// Writes and reads without end, until a rank is lost.
fn flow(world: &mut WorldStreams) {
    let (me, n) = (world.rank(), world.world_size());
    let transport = world.transport();
    let begin = Instant::now();
    let bytes = Bytes::new(0, me, me).take(200_000);
    let (mut arrived, mut written) = (0usize, vec![0; n]);
    let lost = loop {
        let step = transport.progress().and_then(|_| {
            for peer in (0..n).filter(|peer| *peer != me) {
                written[peer] += transport.write(Target::Rank(peer), &bytes[written[peer]..])?;
                written[peer] %= bytes.len();
                let len = transport.arrived(Source::Rank(peer)).len();
                transport.consume(Source::Rank(peer), len);
                arrived += len;
            }
            transport.wait(Duration::from_millis(5))
        });
        match step {
            Ok(()) => assert!(begin.elapsed() < LONG, "rank {me} has read {arrived} bytes"),
            Err(lost) => break lost,
        }
    };
    println!("\nlost {} {}", lost.peer, lost.why);
}

/// Exchanges bytes, in calls that do not block.
fn exchange(world: &mut WorldStreams) {
    let transport = world.transport();
    let mut exchange = Exchange::new(transport, 9, 20_000_000);
    let mut done = false;
    while !done {
        let begin = Instant::now();
        done = exchange.turn(transport).unwrap();
        assert!(begin.elapsed() < SHORT, "a call took {:?}", begin.elapsed());
        assert!(begin < exchange.until, "the exchange hangs");
    }
    exchange.compare(transport.rank());
    transport.progress().unwrap();
    println!("\nexchanged");
}

struct Rank {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Rank {
    fn start(port: u16, rank: usize, world_size: usize, role: &str) -> Self {
        let variables = [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", world_size.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MESHSTEP_PORT", port.to_string()),
            ("MESHSTEP_TOKEN", HEX.to_owned()),
            (ROLE, role.to_owned()),
        ];
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "tcp::tests::processes::child", "--nocapture", "--test-threads=1"])
            .envs(variables)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Rank { child, lines }
    }

    fn all(n: usize, role: &str) -> Vec<Self> {
        let port = free_addr("127.0.0.1").port();
        let mut ranks: Vec<Rank> = (0..n).map(|rank| Rank::start(port, rank, n, role)).collect();
        ranks.iter_mut().for_each(|rank| drop(rank.says("ready")));
        ranks
    }

    fn go(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    /// Returns the next line with this prefix, without the prefix.
    fn says(&mut self, prefix: &str) -> String {
        let mut lines = self.lines.by_ref().map(Result::unwrap);
        let line = lines.find_map(|line| line.strip_prefix(prefix).map(str::to_owned));
        line.unwrap_or_else(|| panic!("it ended without saying {prefix:?}"))
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // Most processes have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn survivors_of_a_killed_process_lose_its_stream() {
    for role in ["flow", "flow sealed"] {
        let mut ranks = Rank::all(3, role);
        ranks.iter_mut().for_each(Rank::go);
        std::thread::sleep(Duration::from_millis(300));
        let begin = Instant::now();
        ranks[1].child.kill().unwrap();
        for rank in [0, 2] {
            assert_eq!(ranks[rank].says("lost "), "1 its process closed it", "{role}");
        }
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    }
}

#[test]
fn streams_to_a_process_that_died_before_their_first_use_are_lost() {
    let mut ranks = Rank::all(3, "flow");
    ranks[1].child.kill().unwrap();
    let begin = Instant::now();
    for rank in [0, 2] {
        ranks[rank].go();
    }
    for rank in [0, 2] {
        assert_eq!(ranks[rank].says("lost "), "1 its process closed it");
    }
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
}

#[test]
fn a_stopped_process_blocks_no_call_and_loses_nothing() {
    for role in ["exchange", "exchange sealed"] {
        let mut ranks = Rank::all(3, role);
        ranks[2].signal("-STOP");
        ranks.iter_mut().for_each(Rank::go);
        std::thread::sleep(Duration::from_millis(1500));
        ranks[2].signal("-CONT");
        std::thread::sleep(Duration::from_millis(50));
        ranks[0].signal("-STOP");
        std::thread::sleep(Duration::from_millis(400));
        ranks[0].signal("-CONT");
        ranks.iter_mut().for_each(|rank| drop(rank.says("exchanged")));
        ranks.iter_mut().for_each(Rank::go);
        ranks.iter_mut().for_each(|rank| drop(rank.says("nothing is left")));
    }
}
