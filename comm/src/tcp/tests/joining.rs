//! Joining: options that do not fit, ranks that are missing or lost.

use super::common::{LONG, environment, free_addr, join_all, options};
use crate::rendezvous::{self, Store};
use crate::shared_memory::{MemoryListener, RingBytes};
use crate::tcp::card::{Card, VERSION};
use crate::tcp::host::Host;
use crate::tcp::{Address, Encrypt, Error, Options};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

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
    let refused = Barrier::new(2);
    let results = join_all(
        &environments,
        |_| options(Encrypt::Remote),
        |world| {
            if world.rank() == 1 {
                refused.wait();
                return None;
            }
            let error = world.next_generation(Duration::from_millis(50)).map(drop).unwrap_err();
            refused.wait();
            Some(error)
        },
    );
    match results[0].as_ref().unwrap() {
        Some(Error::Rendezvous(rendezvous::Error::Late { missing, .. })) => assert_eq!(missing, &[1]),
        other => panic!("{other:?}"),
    }
}

/// Card of a rank that nobody calls.
fn card() -> Vec<u8> {
    let (addr, name) = (free_addr("127.0.0.1"), "0a1b".to_owned());
    Card { addr, name, host: Host::read(None), encrypt: Encrypt::Remote }.encode()
}

/// Joins ranks 0 and 1 of three, with `foreign` in place of rank 2; returns their errors.
fn beside(foreign: impl FnOnce(Store) + Send) -> Vec<Error> {
    let addr = free_addr("127.0.0.1");
    let environments: Vec<_> = (0..3).map(|rank| environment(addr, rank, 3)).collect();
    let shared = |_| Options { shared_memory: true, ..options(Encrypt::Remote) };
    let begin = Instant::now();
    let errors = thread::scope(|scope| {
        let foreign = scope.spawn(|| {
            foreign(Store::join(&environments[2], &shared(2).rendezvous).unwrap());
        });
        let errors = join_all(&environments[..2], shared, |_| ());
        foreign.join().unwrap();
        errors.into_iter().map(Result::unwrap_err).collect()
    });
    assert!(begin.elapsed() < LONG / 4, "{:?}", begin.elapsed());
    errors
}

#[test]
fn a_rank_of_another_version_is_named_on_every_rank() {
    for (version, odd) in [(9, Vec::from([9, 1, 2])), (VERSION, card()[..20].to_vec())] {
        let errors = beside(|store| {
            let cards = store.generation(0).all_gather("addresses of streams", &odd, LONG).unwrap();
            // This version names the first rank of another one.
            let unreadable = cards.iter().position(|card| card[0] != 9 && Card::decode(card).is_ok());
            assert_eq!(unreadable, Some(0));
        });
        assert_eq!(errors, vec![Error::OtherVersion { rank: 2, theirs: version }; 2]);
    }
}

#[test]
fn an_unreadable_card_of_shared_memory_is_named_on_every_rank() {
    let errors = beside(|store| {
        let generation = store.generation(0);
        generation.all_gather("addresses of streams", &card(), LONG).unwrap();
        generation.all_gather("addresses of shared memory", &[9; 33], LONG).unwrap();
    });
    for error in errors {
        let text = error.to_string();
        assert!(text.contains("the card of rank 2 has another version or is damaged"), "{text}");
    }
}

#[test]
fn a_rank_that_leaves_before_it_shares_its_memory_ends_the_others_at_once() {
    let errors = beside(|store| {
        let generation = store.generation(0);
        generation.all_gather("addresses of streams", &card(), LONG).unwrap();
        let listener = MemoryListener::open(RingBytes::default()).unwrap();
        generation.all_gather("addresses of shared memory", &listener.card(), LONG).unwrap();
        // The listener stays alive, so its end cannot be seen.
        thread::sleep(Duration::from_millis(300));
        drop(store);
        thread::sleep(Duration::from_millis(500));
    });
    for error in errors {
        // The first of the others leaves too.
        let left = matches!(error, Error::Rendezvous(rendezvous::Error::Left { .. }));
        assert!(left, "{error:?}");
    }
}
