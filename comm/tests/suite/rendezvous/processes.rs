//! Ranks as real processes, some of which are killed.

use crate::rendezvous::common::{HEX, LONG, free_addr};
use meshstep_comm::rendezvous::{Environment, Failure, Options, Store, Why};
use std::io::{BufRead, BufReader, Lines};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Variable that is set if this binary runs as a rank.
const CHILD: &str = "MESHSTEP_TEST_CHILD";

/// Role of a rank: joins the others, prints that, and prints the failure that it receives. Without the variable it does nothing.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let before = threads();
    let store =
        Store::join(&Environment::from_env().unwrap(), &Options { deadline: LONG, ..Options::default() });
    let store = store.unwrap();
    let generation = store.generation(4);
    generation.barrier("there", LONG).unwrap();
    println!("\nready");
    let failure = generation.wait_failure(LONG);
    println!("\nheard {failure:?}");
    // The next generation does not start without the dead ranks.
    let next = store.generation(5).barrier("next", LONG).unwrap_err();
    println!("\nnext {next}");
    if store.rank() == 0 {
        // The store stays for ranks without the failure.
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
    }
    drop(store);
    // A joined thread is listed until the system has removed it.
    let begin = Instant::now();
    while threads() != before {
        assert!(begin.elapsed() < Duration::from_secs(1), "{} threads, not {before}", threads());
        std::thread::yield_now();
    }
    println!("\nno thread is left");
}

/// Returns the number of threads of this process, if the system reports it.
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count)
}

struct Rank {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Rank {
    fn start(addr: SocketAddr, rank: usize, world_size: usize) -> Self {
        let variables = [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", world_size.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("MASTER_ADDR", addr.ip().to_string()),
            ("MESHSTEP_PORT", addr.port().to_string()),
            ("MESHSTEP_TOKEN", HEX.to_owned()),
            (CHILD, "1".to_owned()),
        ];
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rendezvous::processes::child", "--nocapture", "--test-threads=1"])
            .envs(variables)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Rank { child, lines }
    }

    /// Returns the next line with this prefix, without the prefix.
    fn says(&mut self, prefix: &str) -> String {
        let mut lines = self.lines.by_ref().map(Result::unwrap);
        let line = lines.find_map(|line| line.strip_prefix(prefix).map(str::to_owned));
        line.unwrap_or_else(|| panic!("it ended without saying {prefix:?}"))
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
fn survivors_of_a_killed_process_get_its_failure() {
    for victim in [2, 0] {
        let addr = free_addr();
        let mut ranks: Vec<Rank> = (0..3).map(|rank| Rank::start(addr, rank, 3)).collect();
        ranks.iter_mut().for_each(|rank| drop(rank.says("ready")));
        let begin = Instant::now();
        ranks[victim].child.kill().unwrap();
        let survivors = (0..3).filter(|&rank| rank != victim);
        let failure = Failure::Lost { rank: victim, why: Why::Closed };
        for rank in survivors.clone() {
            assert_eq!(ranks[rank].says("heard "), format!("{:?}", Some(&failure)), "rank {rank}");
        }
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
        for rank in survivors.clone() {
            assert_eq!(ranks[rank].says("next "), failure.to_string(), "rank {rank}");
        }
        for rank in survivors.rev() {
            drop(ranks[rank].child.stdin.take());
            ranks[rank].says("no thread is left");
            assert!(ranks[rank].child.wait().unwrap().success(), "rank {rank}");
        }
    }
}
