//! Bad input of [`tcp::join`]: a typed error on every rank, within the deadline of the join.

use crate::rendezvous::common::{HEX, environment, free_addr};
use meshstep_cases::process::Process;
use meshstep_comm::rendezvous::{self, Environment, EnvironmentError, Token};
use meshstep_comm::tcp::{self, Encrypt, Error, Options};
use meshstep_tensor::{Buffer, Category, Meter};
use std::net::{SocketAddr, TcpListener};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

/// Deadline of joins that fail.
const DEADLINE: Duration = Duration::from_secs(2);
const LONG: Duration = Duration::from_secs(20);
/// Set if this binary runs as a rank.
const CHILD: &str = "MESHSTEP_TEST_JOINS";

type Outcome = Result<(), Error>;

/// Numbers of times that ranks join one after the other.
const ROUNDS: usize = 6;

fn options(deadline: Duration) -> Options {
    let rendezvous = rendezvous::Options { deadline, ..rendezvous::Options::default() };
    Options { rendezvous, timeout: LONG, ..Options::default() }
}

/// Joins with every environment; the outcomes come in time.
fn join_all(environments: &[Environment], deadline: Duration) -> Vec<Outcome> {
    let begin = Instant::now();
    let outcomes = thread::scope(|scope| {
        let join = |environment| scope.spawn(move || tcp::join(environment, &options(deadline)).map(drop));
        let threads: Vec<_> = environments.iter().map(join).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(begin.elapsed() < deadline + Duration::from_secs(2), "{:?}", begin.elapsed());
    outcomes
}

fn world(n: usize) -> (SocketAddr, Vec<Environment>) {
    let addr = free_addr();
    (addr, (0..n).map(|rank| environment(addr, rank, n)).collect())
}

fn rendezvous(outcome: &Outcome) -> &rendezvous::Error {
    match outcome {
        Err(Error::Rendezvous(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn ranks_that_have_left_in_order_join_again_at_once_and_are_no_loss() {
    for shared_memory in [false, true] {
        let (_, ranks) = world(3);
        thread::scope(|scope| {
            for environment in &ranks {
                scope.spawn(move || {
                    let options = Options { shared_memory, ..options(LONG) };
                    for round in 0..ROUNDS {
                        let world = tcp::join(environment, &options).unwrap();
                        world.communicator().barrier().unwrap();
                        let failure = world.generation().failure();
                        assert!(failure.is_none(), "round {round}: {failure:?}");
                    }
                });
            }
        });
    }
}

#[test]
fn a_rank_that_does_not_exist_is_refused_and_missed() {
    let (_, mut ranks) = world(3);
    ranks[2].rank = 3;
    let outcomes = join_all(&ranks, DEADLINE);
    let no_such = EnvironmentError::NoSuchRank { variable: "RANK", rank: 3, world_size: 3 };
    assert_eq!(rendezvous(&outcomes[2]), &rendezvous::Error::Environment(no_such));
    for outcome in &outcomes[..2] {
        let error = rendezvous(outcome);
        assert!(matches!(error, rendezvous::Error::Missing { missing, .. } if missing == &[2]), "{error}");
    }
}

#[test]
fn another_world_size_is_an_error_on_every_rank() {
    let (_, mut ranks) = world(3);
    ranks[1].world_size = 4;
    for outcome in join_all(&ranks, LONG) {
        let expected = rendezvous::Error::WorldSize { rank: 1, world_size: 4, store: 3 };
        assert_eq!(rendezvous(&outcome), &expected);
    }
}

#[test]
fn a_rank_that_is_started_twice_is_an_error_on_every_rank() {
    let (_, mut ranks) = world(3);
    ranks[2] = ranks[1].clone();
    for outcome in join_all(&ranks, LONG) {
        assert_eq!(rendezvous(&outcome), &rendezvous::Error::SameRank { rank: 1 });
    }
}

#[test]
fn a_job_that_is_started_twice_fails_alone() {
    let (addr, ranks) = world(3);
    let (met, refused) = (Barrier::new(4), Barrier::new(4));
    thread::scope(|scope| {
        let first = |environment| {
            let (met, refused) = (&met, &refused);
            scope.spawn(move || {
                let world = tcp::join(environment, &options(LONG)).unwrap();
                met.wait();
                refused.wait();
                world.communicator().barrier().unwrap();
            })
        };
        let threads: Vec<_> = ranks.iter().map(first).collect();
        met.wait();
        let second = join_all(&ranks, LONG);
        refused.wait();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(rendezvous(&second[0]), &rendezvous::Error::PortTaken { addr });
        for rank in [1, 2] {
            assert_eq!(rendezvous(&second[rank]), &rendezvous::Error::SameRank { rank });
        }
    });
}

#[test]
fn a_port_in_use_is_an_error_on_every_rank() {
    let (addr, ranks) = world(3);
    let _taken = TcpListener::bind(addr).unwrap();
    let outcomes = join_all(&ranks, DEADLINE);
    assert_eq!(rendezvous(&outcomes[0]), &rendezvous::Error::PortTaken { addr });
    for outcome in &outcomes[1..] {
        let error = rendezvous(outcome);
        assert!(matches!(error, rendezvous::Error::Unreachable { .. }), "{error}");
        assert!(error.to_string().contains("MESHSTEP_PORT"), "{error}");
    }
}

#[test]
fn another_run_and_another_token_are_refused_and_missed() {
    let other = Token::from_hex(&HEX.replace('0', "f")).unwrap();
    for which in 0..2 {
        let (addr, mut ranks) = world(2);
        match which {
            0 => ranks[1].run_id = "other".to_owned(),
            _ => ranks[1].token = Some(other.clone()),
        }
        let outcomes = join_all(&ranks, DEADLINE);
        let error = rendezvous(&outcomes[1]);
        let (run_id, store) = ("other".to_owned(), "run".to_owned());
        let expected =
            [rendezvous::Error::OtherRun { addr, run_id, store }, rendezvous::Error::WrongToken { addr }];
        assert_eq!(error, &expected[which]);
        let error = rendezvous(&outcomes[0]);
        assert!(matches!(error, rendezvous::Error::Missing { missing, .. } if missing == &[1]), "{error}");
    }
}

/// Ranks without shared memory use sockets among ranks that share theirs.
#[test]
fn ranks_with_and_without_shared_memory_form_one_world() {
    let (_, ranks) = world(4);
    thread::scope(|scope| {
        for environment in &ranks {
            scope.spawn(move || {
                let shared_memory = environment.rank != 2;
                let options = Options { shared_memory, encrypt: Encrypt::Remote, ..options(LONG) };
                sum(&tcp::join(environment, &options).unwrap());
            });
        }
    });
}

/// Adds the ranks' numbers, in a buffer of several tiles.
fn sum(world: &tcp::World) {
    let (n, values) = (world.world_size(), vec![world.rank() as f32; 60_000]);
    let mut buffer = Buffer::from_slice(&values, &Meter::new(), Category::Grads).unwrap();
    world.communicator().all_reduce(&mut buffer, meshstep_comm::Reduction::Sum).unwrap();
    let expected = (n * (n - 1) / 2) as f32;
    assert!(buffer.typed::<f32>().unwrap().iter().all(|value| *value == expected));
    world.communicator().barrier().unwrap();
}

/// Role of a rank: joins and adds. Without the variable it does nothing.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let environment = match Environment::from_env() {
        Ok(environment) => environment,
        Err(error) => return println!("\nfailed: {error}"),
    };
    match tcp::join(&environment, &options(LONG)) {
        Ok(world) => {
            sum(&world);
            println!("\njoined");
        }
        Err(error) => println!("\nfailed: {error}"),
    }
}

/// Starts a process for each rank, with variables of its own; returns what each says.
fn processes(ip: &str, variables: [&[(&str, &str)]; 2]) -> Vec<String> {
    let port = TcpListener::bind((ip, 0)).unwrap().local_addr().unwrap().port().to_string();
    let start = |(rank, own): (usize, &[(&str, &str)])| {
        let rank = rank.to_string();
        let mut all = vec![
            ("RANK", rank.as_str()),
            ("LOCAL_RANK", &rank),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", ip),
            ("MESHSTEP_PORT", &port),
            ("MESHSTEP_TOKEN", HEX),
            (CHILD, "1"),
        ];
        all.extend_from_slice(own);
        Process::start("joining::child", &all)
    };
    let mut processes: Vec<Process> = variables.into_iter().enumerate().map(start).collect();
    processes.iter_mut().map(|process| process.says_one_of(&["joined", "failed"])).collect()
}

#[test]
fn ranks_meet_over_both_protocols_and_at_a_chosen_interface() {
    let iface: &[(&str, &str)] = &[("MESHSTEP_IFACE", "lo")];
    let address: &[(&str, &str)] = &[("MESHSTEP_IFACE", "127.0.0.9")];
    for (ip, variables) in
        [("::1", [&[][..]; 2]), ("127.0.0.1", [iface, iface]), ("127.0.0.1", [iface, address])]
    {
        assert_eq!(processes(ip, variables), ["joined"; 2], "{ip} {variables:?}");
    }
}

#[test]
fn an_interface_that_does_not_exist_is_an_error_on_every_rank() {
    let said = processes("127.0.0.1", [&[], &[("MESHSTEP_IFACE", "no-such0")]]);
    assert!(said[1].starts_with("failed: this machine has no interface \"no-such0\", it has ["), "{said:?}");
    assert!(said[0].starts_with("failed: rank 1 left before"), "{said:?}");
}

#[test]
fn contradictory_variables_of_one_process_are_its_error() {
    let slurm: &[(&str, &str)] = &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")];
    let said = processes("127.0.0.1", [&[("SLURM_PROCID", "1")], slurm]);
    assert!(said[0].starts_with("failed: RANK is 0, but SLURM_PROCID is 1"), "{said:?}");
    assert!(said[1].starts_with("failed: RANK is 1, but SLURM_PROCID is 0"), "{said:?}");
}
