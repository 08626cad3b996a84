//! Tests of clients that negotiate one draft of MoQ Transport and send messages of another.

use bytes::BytesMut;
use millrace_moq::{
    Draft, Filter, Location, Message, ObjectParser, Parameters, StreamHeader, TrackName,
    message::{SetupOptions, Subscribe},
};
use millrace_webtransport::RecvStream;

use super::{TestRelay, WebClient, WebSession, patiently};
use crate::relay::peer::{at, first_subscriber, header, with_publisher};

impl WebClient {
    /// Subscribes to the next object of `track`. Returns the largest location that the relay reports.
    async fn subscribe(&self, session: &WebSession, track: &TrackName) -> (RecvStream, Option<Location>) {
        let (mut send, mut recv) = self.streams(session).open_bi().await.unwrap();
        let parameters = Parameters { filter: Some(Filter::NextObject), ..Parameters::default() };
        let mut bytes = Vec::new();
        let subscribe = Subscribe { request_id: 0, track: track.clone(), parameters };
        Message::from(subscribe).encode(Draft::D18, &mut bytes).unwrap();
        send.write_all(&bytes).await.unwrap();
        let mut answer = BytesMut::new();
        loop {
            answer.extend_from_slice(&patiently(recv.read_chunk(1000, true)).await.unwrap().unwrap().bytes);
            match Message::decode(Draft::D18, &mut answer).unwrap() {
                Some(Message::SubscribeOk(ok)) => return (recv, ok.parameters.largest_object),
                Some(other) => panic!("{other:?}"),
                None => {}
            }
        }
    }

    /// Returns the objects of the next subgroup.
    async fn objects(&self, session: &WebSession) -> Vec<u64> {
        loop {
            let stream = patiently(self.streams(session).accept_uni()).await.unwrap();
            let Some(mut stream) = patiently(self.streams(session).enter_uni(stream)).await.unwrap() else {
                continue;
            };
            let mut bytes =
                patiently(stream.read_chunk(usize::MAX, true)).await.unwrap().unwrap().bytes.to_vec();
            let front = StreamHeader::decode(&mut &bytes[..]).unwrap();
            let Some(StreamHeader::Subgroup(header)) = front else { continue };
            while let Some(chunk) = patiently(stream.read_chunk(usize::MAX, true)).await.unwrap() {
                bytes.extend_from_slice(&chunk.bytes);
            }
            let mut rest = &bytes[..];
            StreamHeader::decode(&mut rest).unwrap();
            let mut parser = ObjectParser::new(&header, (bytes.len() - rest.len()) as u64);
            return std::iter::from_fn(|| parser.next(&mut rest).unwrap()).map(|object| object.id).collect();
        }
    }
}

#[tokio::test]
async fn moq_lite_js_client_gets_the_whole_current_group_on_subscribe() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (_first, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
    let mut subgroup = publisher.subgroup(header(1, 4)).await;
    for id in 0..3 {
        subgroup.object(id, 300).await;
    }
    relay.until_largest(at(4, 2)).await;
    let table = [("moq-lite-js", None, vec![0, 1, 2, 3]), ("another", Some(at(4, 2)), vec![3])];
    let mut clients = Vec::new();
    for (implementation, largest, wanted) in table {
        let client = WebClient::connect(&relay).await;
        let session = client.session(&relay).await;
        let setup = SetupOptions { implementation: Some(implementation.into()), ..SetupOptions::default() };
        let control = client.set_up(&session, setup).await;
        let (request, said) = client.subscribe(&session, &track).await;
        assert_eq!(said, largest, "{implementation}");
        clients.push((client, session, (control, request), implementation, wanted));
    }
    subgroup.object(3, 300).await;
    subgroup.finish();
    for (client, session, _held, implementation, wanted) in clients {
        assert_eq!(client.objects(&session).await, wanted, "{implementation}");
    }
}
