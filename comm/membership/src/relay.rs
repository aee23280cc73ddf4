//! Answers that rank 0 of a worker got, encoded as bytes for its other ranks.

use crate::member::Request;
use crate::round::Ballot;
pub use crate::wire::Wire;
use crate::wire::wire;
use crate::{Error, Refusal};
use std::time::Duration;

/// An error of rank 0 in a form that can be encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Why {
    Refused { refusal: Refusal },
    Unanswered { voting: bool, after: Duration },
    Undecided { round: u64 },
    OtherRound { asked: u64, round: u64 },
    Overtaken {},
    Left {},
    Alone { step: u64, left: u64 },
    Away { step: u64, last: u64, alone: u64, after: Duration },
    Other { message: String },
}

/// Encodes an answer as bytes.
pub fn encode<T: Wire>(answer: Result<T, Error>) -> Vec<u8> {
    let mut out = Vec::new();
    answer.is_ok().put(&mut out);
    match answer {
        Ok(value) => value.put(&mut out),
        Err(error) => Why::from(error).put(&mut out),
    }
    out
}

/// Decodes an answer; `None` if the bytes are not a valid one.
pub fn decode<T: Wire>(mut bytes: &[u8]) -> Option<Result<T, Error>> {
    let input = &mut bytes;
    let answer = if bool::take(input)? { Ok(T::take(input)?) } else { Err(Why::take(input)?.into()) };
    bytes.is_empty().then_some(answer)
}

fn voting() -> &'static str {
    Request::Vote { round: 0, ballot: Ballot::Failed }.name()
}

impl From<Error> for Why {
    fn from(error: Error) -> Self {
        match error {
            Error::Refused(refusal) => Why::Refused { refusal },
            Error::Unanswered { what, after } => Why::Unanswered { voting: what == voting(), after },
            Error::Undecided { round } => Why::Undecided { round },
            Error::OtherRound { asked, round } => Why::OtherRound { asked, round },
            Error::Overtaken => Why::Overtaken {},
            Error::Left => Why::Left {},
            Error::Alone { step, left } => Why::Alone { step, left },
            Error::Away { step, last, alone, after } => Why::Away { step, last, alone, after },
            other => Why::Other { message: other.to_string() },
        }
    }
}

impl From<Why> for Error {
    fn from(why: Why) -> Self {
        match why {
            Why::Refused { refusal } => Error::Refused(refusal),
            Why::Unanswered { voting: true, after } => Error::Unanswered { what: voting(), after },
            Why::Unanswered { after, .. } => Error::Unanswered { what: Request::Boundary(0).name(), after },
            Why::Undecided { round } => Error::Undecided { round },
            Why::OtherRound { asked, round } => Error::OtherRound { asked, round },
            Why::Overtaken {} => Error::Overtaken,
            Why::Left {} => Error::Left,
            Why::Alone { step, left } => Error::Alone { step, left },
            Why::Away { step, last, alone, after } => Error::Away { step, last, alone, after },
            Why::Other { message } => Error::Rank0 { message },
        }
    }
}

wire!(enum Why {
    1 => Refused { refusal },
    2 => Unanswered { voting, after },
    3 => Undecided { round },
    4 => OtherRound { asked, round },
    5 => Overtaken {},
    6 => Left {},
    7 => Other { message },
    8 => Alone { step, left },
    9 => Away { step, last, alone, after },
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::round::{Decision, Departure, Gone, Round, Seat};

    fn there_and_back<T: Wire + Clone>(answer: &Result<T, Error>) -> Result<T, Error> {
        let bytes = encode(answer.clone());
        assert!((0..bytes.len()).all(|len| decode::<T>(&bytes[..len]).is_none()));
        decode(&bytes).unwrap()
    }

    #[test]
    fn all_ranks_hear_what_rank_0_heard() {
        let seat = Seat { id: 3, counts: true, contact: "there".to_owned() };
        let gone = vec![Gone { id: 4, why: Departure::Silent }];
        let round = Ok(Round { number: 7, epoch: 2, step: 5, rank: 0, members: vec![seat], gone });
        assert_eq!(there_and_back(&round), round);
        let abort = Ok(Decision::Abort { vetoed: vec![], failed: vec![1], lost: vec![2, 3] });
        assert_eq!(there_and_back(&abort), abort);
        let after = Duration::from_millis(1500);
        let errors = [
            Error::Refused(Refusal::TooFew { have: 1, min: 2 }),
            Error::Unanswered { what: "a vote", after },
            Error::Unanswered { what: "a boundary", after },
            Error::Undecided { round: 3 },
            Error::OtherRound { asked: 1, round: 2 },
            Error::Overtaken,
            Error::Left,
            Error::Alone { step: 8, left: 3 },
            Error::Away { step: 12, last: 4, alone: 8, after },
        ];
        for error in errors {
            assert_eq!(there_and_back::<Decision>(&Err(error.clone())), Err(error));
        }
        let message = "cannot start the membership thread: full".to_owned();
        let told = there_and_back::<Round>(&Err(Error::NoThread { message: "full".to_owned() }));
        assert_eq!(told, Err(Error::Rank0 { message }));
    }
}
