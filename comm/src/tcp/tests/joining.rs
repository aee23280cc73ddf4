//! Joining: options that do not fit, ranks that are missing or lost.

use super::common::{LONG, environment, free_addr, join_all, options};
use crate::rendezvous;
use crate::tcp::{Address, Encrypt, Error, Options};
use std::time::Duration;

#[test]
fn unlike_encryption_is_named_on_every_rank() {
    let addr = free_addr("127.0.0.1");
    let environments: Vec<_> = (0..3).map(|rank| environment(addr, rank, 3)).collect();
    let encrypt = |rank| if rank == 2 { Encrypt::Never } else { Encrypt::Always };
    let errors = join_all(&environments, |rank| options(encrypt(rank)), |_| ());
    for (rank, error) in errors.into_iter().enumerate() {
        let (other, theirs) = if rank == 2 { (0, Encrypt::Always) } else { (2, Encrypt::Never) };
        let expected = Error::OtherEncryption { rank: other, theirs, mine: encrypt(rank) };
        assert_eq!(error, Err(expected), "rank {rank}");
    }
}

#[test]
fn a_rank_with_a_wrong_address_ends_the_others() {
    let addr = free_addr("127.0.0.1");
    let environments: Vec<_> = (0..2).map(|rank| environment(addr, rank, 2)).collect();
    // An address for documentation, which no machine has.
    let foreign = Some(Address::parse("192.0.2.1"));
    let options =
        |rank| Options { address: foreign.clone().filter(|_| rank == 1), ..options(Encrypt::Remote) };
    let mut errors = join_all(&environments, options, |_| ()).into_iter();
    let first = errors.next().unwrap();
    assert!(matches!(first, Err(Error::Rendezvous(rendezvous::Error::Left { rank: 1, .. }))), "{first:?}");
    let second = errors.next().unwrap();
    assert!(matches!(second, Err(Error::Rendezvous(rendezvous::Error::NotLocal { .. }))), "{second:?}");
}

#[test]
fn a_rank_that_left_keeps_the_next_generation_from_starting() {
    let addr = free_addr("127.0.0.1");
    let environments: Vec<_> = (0..3).map(|rank| environment(addr, rank, 3)).collect();
    let results = join_all(
        &environments,
        |_| options(Encrypt::Remote),
        |world| {
            if world.rank() == 2 {
                return None;
            }
            Some(world.next_generation(LONG).map(drop))
        },
    );
    for result in &results[..2] {
        let error = result.as_ref().unwrap().as_ref().unwrap().as_ref().unwrap_err();
        let left = matches!(error, Error::Rendezvous(rendezvous::Error::Left { rank: 2 | 0, .. }));
        assert!(left, "{error:?}");
    }
}

#[test]
fn a_late_rank_is_named() {
    let addr = free_addr("127.0.0.1");
    let environments: Vec<_> = (0..2).map(|rank| environment(addr, rank, 2)).collect();
    let results = join_all(
        &environments,
        |_| options(Encrypt::Remote),
        |world| {
            if world.rank() == 1 {
                std::thread::sleep(Duration::from_millis(400));
                return None;
            }
            Some(world.next_generation(Duration::from_millis(50)).map(drop).unwrap_err())
        },
    );
    match results[0].as_ref().unwrap() {
        Some(Error::Rendezvous(rendezvous::Error::Late { missing, .. })) => assert_eq!(missing, &[1]),
        other => panic!("{other:?}"),
    }
}
