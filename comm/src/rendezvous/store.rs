//! A rank's membership in the store: values and failures, before and beside every backend.

use super::connect::{self, StorePlace};
use super::link::{self, Receiver, Sender, after};
use super::message::Message;
use super::server::Server;
use super::view::{Shared, StoreView};
use super::{Broken, Environment, Error, Generation, Options, Why};
use crate::sync::Mutex;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// Time for the store to close a connection after its goodbye.
const LINGER: Duration = Duration::from_secs(2);

/// Connection to the job's store after all ranks have joined: small values and failure reports.
///
/// Rank 0 runs the store, and the others communicate through it; it ends with rank 0. Dropping it sends a goodbye, unless the
/// thread panics: then the others see this rank as lost. No thread outlives it.
#[derive(Debug)]
pub struct Store {
    member: Arc<Member>,
    reader: Option<JoinHandle<()>>,
    /// Declared after the reader: on rank 0 the store outlives its own connection.
    server: Option<Server>,
}

/// State shared by a store and its generations.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) shared: Shared,
    sender: Mutex<Sender>,
    stream: Arc<TcpStream>,
    addr: SocketAddr,
}

impl Store {
    /// Joins the other ranks of `environment`; returns when all have joined. On rank 0 it starts the store first.
    ///
    /// # Errors
    /// [`Error::Missing`] at the deadline, on every rank that joined; [`Error::Unreachable`] if there is no store until then;
    /// [`Error::WrongToken`], [`Error::SameRank`], [`Error::WorldSize`], [`Error::OtherRun`], [`Error::OtherRestart`] and
    /// [`Error::NotAStore`] at once, and the others that [`Error`] lists.
    pub fn join(environment: &Environment, options: &Options) -> Result<Self, Error> {
        environment.check()?;
        let until = after(options.deadline);
        let server = match environment.rank {
            0 => {
                let listener = connect::listen(environment, until)?;
                Some(Server::start(
                    listener,
                    environment,
                    connect::psk(environment.token.as_ref())?,
                    options,
                )?)
            }
            _ => None,
        };
        let place = connect::connect(environment, options, until)?;
        let store = Self::take(place, server, environment, options)?;
        let left = until.saturating_duration_since(std::time::Instant::now());
        match store.gather(left, options.deadline) {
            Ok(()) => Ok(store),
            Err(error) => Err(store.give_up(error, options)),
        }
    }

    fn take(
        place: StorePlace,
        server: Option<Server>,
        environment: &Environment,
        options: &Options,
    ) -> Result<Self, Error> {
        let StorePlace { addr, stream, receiver, sender } = place;
        let Environment { rank, world_size, .. } = *environment;
        let shared = Shared::new(world_size);
        let member = Member { rank, world_size, shared, sender: Mutex::new(sender), stream, addr };
        let member = Arc::new(member);
        let (for_thread, silence) = (Arc::clone(&member), options.silence);
        let body = move || for_thread.listen(receiver, silence);
        let reader = Builder::new().name(format!("rank {rank} of the store")).spawn(body);
        match reader {
            Ok(reader) => Ok(Store { member, reader: Some(reader), server }),
            Err(error) => {
                link::cut(&member.stream);
                Err(Error::System { what: "starting a thread for the store", message: error.to_string() })
            }
        }
    }

    /// Waits for all ranks to join.
    fn gather(&self, left: Duration, deadline: Duration) -> Result<(), Error> {
        let member = &self.member;
        let look = |view: &StoreView| {
            if let Some(error) = member.trouble(view).or_else(|| view.lost().map(Error::from)) {
                return Some(Err(error));
            }
            if view.is_complete() {
                return Some(Ok(()));
            }
            // A rank that has left no longer waits for the others.
            view.any_left().map(|rank| {
                Err(Error::Left { rank, awaited: format!("ranks {:?} had come", view.missing()) })
            })
        };
        let late = |view: &StoreView| {
            let (addr, missing, gave_up) = (member.addr, view.missing(), member.rank);
            Err(Error::Missing { addr, missing, gave_up, after: deadline, turned_away: Vec::new() })
        };
        member.shared.wait(left, look, late)
    }

    /// Reports that this rank gives up, unless another rank did so first. The store stays for a while, so that late ranks learn
    /// the reason.
    fn give_up(&self, mut error: Error, options: &Options) -> Error {
        let member = &self.member;
        let everybody = |view: &StoreView| (view.is_complete() || view.over).then_some(());
        if let Error::Missing { gave_up, turned_away, .. } = &mut error {
            if *gave_up == member.rank {
                // If the send fails, the others learn it from the connection's end.
                let _ = member.send(&Message::GiveUp { after: options.deadline });
            }
            *turned_away = self.server.as_ref().map(Server::turned_away).unwrap_or_default();
        } else if self.server.is_some() {
            member.shared.wait(options.handshake, everybody, |_| ());
        }
        error
    }

    /// Rank of this process.
    pub fn rank(&self) -> usize {
        self.member.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.member.world_size
    }

    /// Address of the store.
    pub fn addr(&self) -> SocketAddr {
        self.member.addr
    }

    /// Returns the values and failures of one generation. A rebuilt communicator takes the next generation and sees none of the
    /// old one's.
    pub fn generation(&self, number: u64) -> Generation {
        Generation::new(Arc::clone(&self.member), number)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let member = &self.member;
        member.shared.write(|view| view.closed = true);
        if !std::thread::panicking() {
            // The store may have ended already.
            let _ = member.send(&Message::Bye);
            member.sender.lock().finish();
            member.shared.wait(LINGER, |view| view.over.then_some(()), |_| ());
        }
        link::cut(&member.stream);
        // The reader thread does not panic; if it did, a drop has no caller to report to.
        let _ = self.reader.take().map(JoinHandle::join);
        self.server.take();
    }
}

impl Member {
    pub(super) fn send(&self, message: &Message) -> Result<(), Why> {
        self.sender.lock().message(message)
    }

    /// Enters a gather. Values of one name leave this rank in the order of their tickets.
    pub(super) fn enter(&self, generation: u64, name: &str, value: &[u8]) -> Result<u64, Why> {
        let mut sender = self.sender.lock();
        let ticket = self.shared.edit(|view| view.enter(generation, name));
        let (name, value) = (name.to_owned(), value.to_vec());
        sender.message(&Message::Gather { generation, name, value })?;
        Ok(ticket)
    }

    /// Returns an error that concerns every generation but is no failure of a rank.
    pub(super) fn trouble(&self, view: &StoreView) -> Option<Error> {
        if view.closed {
            return Some(Error::Closed);
        }
        view.broken().map(|broken| match *broken {
            Broken::SameRank { rank } => Error::SameRank { rank },
            Broken::WorldSize { rank, world_size } => {
                Error::WorldSize { rank, world_size, store: self.world_size }
            }
            Broken::Full { max } => Error::Full { max },
            Broken::GaveUp { rank: gave_up, after } => {
                let (addr, missing) = (self.addr, view.missing());
                Error::Missing { addr, missing, gave_up, after, turned_away: Vec::new() }
            }
        })
    }

    /// Applies the store's messages and answers its beats, until the connection ends.
    fn listen(&self, mut receiver: Receiver, silence: Duration) {
        let why = loop {
            let applied = receiver.messages(after(silence)).and_then(|messages| self.apply(messages));
            if let Err(why) = applied {
                break why;
            }
        };
        link::cut(&self.stream);
        self.shared.write(|view| view.end(why));
    }

    fn apply(&self, messages: Vec<Message>) -> Result<(), Why> {
        let is_beat = |message: &Message| matches!(message, Message::Beat);
        let beats = messages.iter().filter(|message| is_beat(message)).count();
        if beats < messages.len() {
            let others = messages.into_iter().filter(|message| !is_beat(message));
            self.shared
                .write(|view| others.map(|message| view.apply(message)).collect::<Option<()>>())
                .ok_or(Why::NotUnderstood)?;
        }
        if beats > 0 { self.send(&Message::Beat) } else { Ok(()) }
    }
}
