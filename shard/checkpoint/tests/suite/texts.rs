//! Texts of errors: a chain of sources says each fact once.

use meshstep_checkpoint::pytorch::PyTorchError;
use meshstep_checkpoint::{self as checkpoint, CheckpointError, CoverError, Failed, Load, Mismatch, Store};
use meshstep_comm::loopback::spawn;
use std::error::Error;

/// Returns all texts of a chain of sources, as programs print them.
fn said_by(error: &(dyn Error + 'static)) -> Vec<String> {
    let mut said = vec![error.to_string()];
    said.extend(error.source().map_or_else(Vec::new, said_by));
    said
}

#[test]
fn no_text_is_repeated_by_a_source() {
    let cause = CheckpointError::Size { path: "/run/a".into(), expected: 7, found: 3 };
    let cover = CoverError::TooLarge { shape: vec![1 << 40, 1 << 40] };
    let (tensor, slot) = ("w".to_owned(), "m".to_owned());
    let errors = [
        CheckpointError::Unreadable { what: "slot \"m\"".to_owned(), source: Box::new(cause.clone()) },
        CheckpointError::Cover { tensor: tensor.clone(), slot, source: cover },
        Mismatch::Shape { tensor, saved: vec![1], here: vec![2] }.into(),
        PyTorchError::Missing { key: "w".to_owned() }.into(),
        cause,
    ];
    for error in errors {
        let text = error.to_string();
        let failed = Failed { rank: 3, error: error.clone() };
        assert_eq!(failed.to_string(), format!("on rank 3: {text}"), "one line has all of it");
        let outer = checkpoint::Error::from(failed.clone());
        for error in [&error as &(dyn Error + 'static), &failed, &outer] {
            let said = said_by(error);
            let chain = said.join(": ");
            assert!(said[1..].iter().all(|inner| !said[0].contains(inner)), "{chain}");
            assert_eq!(chain.matches(&*text).count(), 1, "{chain}");
        }
    }
}

#[test]
fn a_load_that_fails_says_why_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    let run = crate::common::Run { ranks: 2, ..crate::common::Run::default() };
    let told = spawn(2, |comm| {
        checkpoint::load(&mut run.build(comm).unwrap(), &store, Load::default()).map(drop).unwrap_err()
    });
    for error in told.unwrap() {
        let chain = said_by(&error).join(": ");
        assert_eq!(chain.matches("holds no checkpoint").count(), 1, "{chain}");
    }
}
