//! Requests of a client in draft-22.

use bytes::BytesMut;

use super::*;
use crate::{
    incomplete::Incomplete,
    wire::{GoAways, Incoming, MessageReader},
};

pub const DRAFT: Draft = Draft::D22;

/// A request, and what is answered.
pub struct Asked {
    pub send: SendStream,
    pub reader: MessageReader,
}

impl Asked {
    pub async fn open(connection: &Connection, message: impl Into<Message>) -> Self {
        let (send, recv) = connection.streams().open_bi().await.unwrap();
        let held = Arc::<Incomplete>::default().stream();
        let reader = MessageReader::new(DRAFT, recv, BytesMut::new(), held, GoAways::on_request(true));
        let mut asked = Self { send, reader };
        asked.say(message).await;
        asked
    }

    pub async fn say(&mut self, message: impl Into<Message>) {
        self.send.write_all(&encoded_in(DRAFT, message)).await.unwrap();
    }

    pub async fn message(&mut self) -> Message {
        match time::timeout(PATIENCE, self.reader.next()).await.unwrap().unwrap() {
            Incoming::Message(message) => message,
            other => panic!("{other:?}"),
        }
    }
}
