//! Requests of a client that speaks draft-22.

use bytes::BytesMut;
use millrace_moq::incomplete::IncompleteBytes;

use super::*;
use crate::wire::{GoAways, IncomingMessage, MessageReader};

pub const DRAFT: Draft = Draft::D22;

/// A request of a client, with the reader of its answers.
pub struct AnsweredRequest {
    pub send: SendStream,
    pub reader: MessageReader,
}

impl AnsweredRequest {
    pub async fn open(connection: &Connection, message: impl Into<Message>) -> Self {
        let (send, recv) = connection.streams().open_bi().await.unwrap();
        let held = Arc::<IncompleteBytes>::default().stream();
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
            IncomingMessage::Message(message) => message,
            other => panic!("{other:?}"),
        }
    }
}
