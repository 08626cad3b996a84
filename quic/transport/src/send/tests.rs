use std::{collections::HashMap, sync::Arc};

use super::*;
use crate::send::{PacketFlow, SendHandover};

fn socket(address: &str) -> UdpSocket {
    let socket = UdpSocket::bind(address).expect("loopback");
    socket.set_read_timeout(Some(Duration::from_secs(60))).expect("timeout");
    nix::sys::socket::setsockopt(&socket, sockopt::RcvBuf, &(4 << 20)).expect("buffer");
    socket
}

fn push(batch: &mut PacketBatch, to: SocketAddr, packet: &[u8]) {
    assert!(batch.packet(to, |out| {
        out.extend_from_slice(packet);
        true
    }));
}

fn packet(number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (number * 7 + i) as u8).collect()
}

/// Reads `count` datagrams from `socket`, and checks that there are no more.
fn receive(socket: &UdpSocket, count: usize) -> Vec<Vec<u8>> {
    let mut buf = [0; 65_536];
    let mut read = || socket.recv(&mut buf).map(|len| buf[..len].to_vec());
    let packets = (0..count).map(|_| read().expect("sent over loopback")).collect();
    socket.set_nonblocking(true).expect("nonblocking");
    assert_eq!(socket.recv(&mut [0; 1]).expect_err("no more").kind(), io::ErrorKind::WouldBlock);
    socket.set_nonblocking(false).expect("blocking");
    packets
}

const LOOPBACKS: [&str; 2] = ["127.0.0.1:0", "[::1]:0"];

#[test]
fn every_byte_arrives_in_order_with_and_without_gso() {
    for address in LOOPBACKS {
        for gso in [true, false] {
            let sender = BatchSender::new(&socket(address), gso).expect("sender");
            assert_eq!(sender.gso(), gso, "this kernel has UDP_SEGMENT");
            let to = socket(address);
            let mut batch = PacketBatch::default();
            let lens = [1200, 1200, 1200, 700, 1200, 1200, 40, 40, 1300, 1300, 1];
            let packets: Vec<_> = lens.iter().enumerate().map(|(i, len)| packet(i, *len)).collect();
            for packet in &packets {
                push(&mut batch, to.local_addr().expect("bound"), packet);
            }
            let report = sender.flush(&mut batch);
            assert_eq!(receive(&to, packets.len()), packets);
            let bytes = lens.iter().sum::<usize>() as u64;
            // With segmentation offload, the messages of 3 x 1200 + 700, 2 x 1200 + 40 and 40 bytes fit a segment size
            // of 1200 bytes, so one system call sends them. The message of 2 x 1300 + 1 bytes needs another call.
            let system_calls = if gso { 2 } else { 1 };
            let expected = SendReport { packets: 11, bytes, system_calls, ..SendReport::default() };
            assert_eq!(report, expected, "{address} gso {gso}");
            // exact: the totals of sent packets are final, since `flush` has sent all packets
            assert_eq!(sender.totals(), expected);
            assert!(batch.is_empty());
        }
    }
}

#[test]
fn packets_to_many_destinations_take_one_system_call() {
    for address in LOOPBACKS {
        let sender = BatchSender::new(&socket(address), true).expect("sender");
        let receivers: Vec<_> = (0..300).map(|_| socket(address)).collect();
        let mut batch = PacketBatch::default();
        for (i, receiver) in receivers.iter().enumerate() {
            push(&mut batch, receiver.local_addr().expect("bound"), &packet(i, 1200));
        }
        let report = sender.flush(&mut batch);
        assert_eq!((report.packets, report.system_calls), (300, 1));
        for (i, receiver) in receivers.iter().enumerate() {
            assert_eq!(receive(receiver, 1), [packet(i, 1200)]);
        }
    }
}

#[test]
fn long_batch_is_split_at_the_kernels_limits() {
    for (gso, system_calls) in [(true, 1), (false, 2)] {
        let sender = BatchSender::new(&socket("127.0.0.1:0"), gso).expect("sender");
        let to = socket("127.0.0.1:0");
        let mut batch = PacketBatch::default();
        for i in 0..1500 {
            push(&mut batch, to.local_addr().expect("bound"), &packet(i, 100));
        }
        assert_eq!(batch.messages(gso).len(), if gso { 1500usize.div_ceil(64) } else { 1500 });
        assert_eq!(sender.flush(&mut batch).system_calls, system_calls);
        let packets = receive(&to, 1500);
        assert!(packets.iter().enumerate().all(|(i, bytes)| *bytes == packet(i, 100)));
    }
}

#[test]
fn dual_stack_socket_sends_ipv4_and_ipv6() {
    let sender = BatchSender::new(&socket("[::]:0"), true).expect("sender");
    let receivers = LOOPBACKS.map(socket);
    let mut batch = PacketBatch::default();
    for receiver in &receivers {
        push(&mut batch, receiver.local_addr().expect("bound"), b"hello");
    }
    assert_eq!(sender.flush(&mut batch).packets, 2);
    for receiver in &receivers {
        assert_eq!(receive(receiver, 1), [b"hello"]);
    }
}

#[test]
fn unsendable_packets_of_a_batch_are_counted_and_the_rest_is_sent() {
    let sender = BatchSender::new(&socket("127.0.0.1:0"), true).expect("sender");
    let to = socket("127.0.0.1:0");
    let good = to.local_addr().expect("bound");
    let mut batch = PacketBatch::default();
    push(&mut batch, good, b"first");
    push(&mut batch, good, &[0; 65_508]);
    push(&mut batch, "[::1]:9".parse().expect("address"), b"wrong family");
    push(&mut batch, good, b"last");
    let report = sender.flush(&mut batch);
    assert_eq!(receive(&to, 2), [b"first".as_slice(), b"last"]);
    assert_eq!((report.packets, report.too_large, report.failed), (2, 1, 1));
}

/// Sends a batch of `packets` through a simulated kernel. The first system calls return `answers`, and later calls
/// accept all packets.
fn with_answers(packets: &[(u16, usize)], answers: &[nix::Result<usize>]) -> (SendReport, bool, Vec<usize>) {
    let mut batch = PacketBatch::default();
    for (port, len) in packets {
        push(&mut batch, SocketAddr::from(([127, 0, 0, 1], *port)), &packet(0, *len));
    }
    let gso = AtomicBool::new(true);
    let mut answers = answers.iter();
    let mut sent = Vec::new();
    let kernel = |call: &[KernelMessage], _: Option<u16>| {
        let count = match answers.next() {
            Some(answer) => (*answer)?,
            None => call.len(),
        };
        sent.extend(call.iter().take(count).map(|message| message.packets));
        Ok(count)
    };
    let report = send_all(&batch, &gso, kernel, || {});
    (report, gso.into_inner(), sent)
}

#[test]
fn batch_is_resumed_after_partial_sends_and_errors_are_counted() {
    let five: Vec<_> = (1..6).map(|port| (port, 100)).collect();
    let run = [(1, 100), (1, 100), (1, 100), (2, 100)];
    let report =
        |packets, system_calls| SendReport { packets, bytes: packets * 100, system_calls, ..<_>::default() };
    let table: [(&str, &[_], &[_], _, bool, &[_]); 8] = [
        ("all", &five, &[], report(5, 1), true, &[1; 5]),
        ("partly, then the rest", &five, &[Ok(2)], report(5, 2), true, &[1; 5]),
        ("interrupted", &five, &[Err(Errno::EINTR)], report(5, 2), true, &[1; 5]),
        ("full, waits", &five, &[Ok(3), Err(Errno::EAGAIN)], report(5, 3), true, &[1; 5]),
        (
            "stays full, drops the rest",
            &five,
            &[Ok(3), Err(Errno::EAGAIN), Err(Errno::EAGAIN)],
            SendReport { overflowed: 2, ..report(3, 3) },
            true,
            &[1; 3],
        ),
        ("no offload: never again", &run, &[Err(Errno::EIO)], report(4, 2), false, &[1; 4]),
        ("segments too large: one by one", &run, &[Err(Errno::EMSGSIZE)], report(4, 2), true, &[1; 4]),
        (
            "one forbidden",
            &run,
            &[Ok(1), Err(Errno::EPERM)],
            SendReport { failed: 1, ..report(3, 2) },
            true,
            &[3],
        ),
    ];
    for (description, packets, answers, report, gso, sent) in table {
        assert_eq!(with_answers(packets, answers), (report, gso, sent.to_vec()), "{description}");
    }
}

#[test]
fn segmented_message_is_split_into_its_packets() {
    let to = "127.0.0.1:1".parse().expect("address");
    let mut batch = PacketBatch::default();
    let packets: Vec<_> = [500, 500, 500, 20].iter().enumerate().map(|(i, len)| packet(i, *len)).collect();
    for packet in &packets {
        push(&mut batch, to, packet);
    }
    let messages = batch.messages(true);
    assert_eq!(messages.len(), 1);
    let split: Vec<_> = messages[0].split().collect();
    assert_eq!(split, batch.messages(false));
    assert!(batch.iter().map(|(_, bytes)| bytes).eq(packets.iter().map(Vec::as_slice)));
}

#[test]
fn packet_that_was_not_built_is_not_in_the_batch() {
    let to = "127.0.0.1:1".parse().expect("address");
    let mut batch = PacketBatch::default();
    push(&mut batch, to, b"one");
    let built = batch.packet(to, |out| {
        out.extend_from_slice(b"half");
        false
    });
    assert!(!built && !batch.packet(to, |_| true));
    push(&mut batch, to, b"two");
    let packets: Vec<_> = batch.iter().map(|(_, bytes)| bytes.to_vec()).collect();
    assert_eq!(packets, [b"one", b"two"]);
}

#[test]
fn messages_never_exceed_the_kernels_limits() {
    let mut batch = PacketBatch::default();
    for i in 0..2000 {
        let to = SocketAddr::from(([127, 0, 0, 1], 1 + (i / 300) as u16));
        push(&mut batch, to, &packet(i, [1452, 1200, 9, 1452][i / 100 % 4]));
    }
    let mut packets: HashMap<SocketAddr, usize> = HashMap::new();
    for message in batch.messages(true) {
        assert!(message.packets <= 64 && message.bytes.len() <= 65_000, "{message:?}");
        *packets.entry(message.flow.to).or_default() += message.packets;
    }
    assert_eq!(packets.values().sum::<usize>(), 2000);
}

#[test]
fn packets_have_the_source_address_of_their_flow() {
    let table =
        [("0.0.0.0:0", "127.0.0.1:0", ["127.0.0.2", "127.0.0.3"]), ("[::]:0", "[::1]:0", ["::1", "::1"])];
    for (any, receiver, sources) in table {
        let socket = UdpSocket::bind(any).unwrap();
        let receiver = UdpSocket::bind(receiver).unwrap();
        receiver.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        for gso in [false, true] {
            let sender = BatchSender::new(&socket, gso).unwrap();
            let mut batch = PacketBatch::default();
            for from in sources {
                for number in 0..3 {
                    let flow = PacketFlow {
                        to: receiver.local_addr().unwrap(),
                        from: Some(from.parse().unwrap()),
                        traffic_class: 0,
                    };
                    batch.packet(flow, |out| {
                        out.extend_from_slice(&packet(number, 100));
                        true
                    });
                }
            }
            assert_eq!(sender.flush(&mut batch).packets, 6);
            for expected in sources {
                for _ in 0..3 {
                    let (_, from) = receiver.recv_from(&mut [0; 200]).unwrap();
                    assert_eq!(from.ip(), expected.parse::<IpAddr>().unwrap());
                }
            }
        }
    }
}

#[test]
fn packets_have_the_traffic_class_of_their_flow() {
    use nix::sys::socket::{ControlMessageOwned, recvmsg, setsockopt};
    for address in LOOPBACKS {
        let receiver = socket(address);
        match receiver.local_addr().unwrap().is_ipv6() {
            true => setsockopt(&receiver, sockopt::Ipv6RecvTClass, &true).unwrap(),
            false => setsockopt(&receiver, sockopt::IpRecvTos, &true).unwrap(),
        }
        let to = receiver.local_addr().unwrap();
        let sender = BatchSender::new(&socket(address), true).unwrap();
        let mut batch = PacketBatch::default();
        for (number, traffic_class) in [0u8, 0xb8, 0xb8, 0xba].into_iter().enumerate() {
            batch.packet(PacketFlow { traffic_class, ..to.into() }, |out| {
                out.extend_from_slice(&packet(number, 100));
                true
            });
        }
        assert_eq!(sender.flush(&mut batch).packets, 4);
        sender.send_one(PacketFlow { traffic_class: 0xbb, ..to.into() }, &packet(4, 200), Some(100)).unwrap();
        for expected in [0, 0xb8, 0xb8, 0xba, 0xbb, 0xbb] {
            let mut space = nix::cmsg_space!(i32);
            let mut buf = [0; 300];
            let mut slices = [io::IoSliceMut::new(&mut buf)];
            let flags = MsgFlags::empty();
            let fd = receiver.as_raw_fd();
            let received = recvmsg::<SockaddrStorage>(fd, &mut slices, Some(&mut space), flags).unwrap();
            let class = received.cmsgs().unwrap().find_map(|message| match message {
                ControlMessageOwned::Ipv4Tos(tos) => Some(i32::from(tos)),
                ControlMessageOwned::Ipv6TClass(class) => Some(class),
                _ => None,
            });
            assert_eq!((received.bytes, class), (100, Some(expected)), "{address}");
        }
    }
}

/// Adds packets of a connection, with these numbers, to a batch.
fn seal(
    batch: &mut PacketBatch,
    connection: &Arc<SendHandover>,
    to: SocketAddr,
    numbers: std::ops::Range<usize>,
) {
    batch.add_connection(connection, |batch| {
        numbers.for_each(|number| push(batch, to, &packet(number, 100)));
    });
}

#[test]
fn packets_wait_for_earlier_sealed_packets_of_the_same_connection() {
    let receiver = socket("127.0.0.1:0");
    let to = receiver.local_addr().unwrap();
    let sender = BatchSender::new(&socket("127.0.0.1:0"), true).unwrap();
    let (one, other): (Arc<SendHandover>, Arc<SendHandover>) = Default::default();
    let mut first = PacketBatch::default();
    let mut second = PacketBatch::default();
    seal(&mut first, &one, to, 0..3);
    seal(&mut second, &other, to, 100..101);
    seal(&mut second, &one, to, 3..5);
    seal(&mut second, &other, to, 101..103);
    seal(&mut first, &one, to, 5..6);
    assert_eq!(sender.flush(&mut second).packets, 3, "only packets of the other connection are sent");
    // The second batch was sent and has no packets of the connection. New packets still wait behind those of the first
    // batch.
    seal(&mut second, &one, to, 6..7);
    assert_eq!(sender.flush(&mut second).packets, 0);
    assert_eq!(sender.flush(&mut first).packets, 7);
    let expected = [100, 101, 102, 0, 1, 2, 3, 4, 5, 6];
    assert_eq!(receive(&receiver, 10), expected.map(|number| packet(number, 100)));
    // No batch has packets of the connection now.
    seal(&mut second, &one, to, 7..8);
    assert_eq!(sender.flush(&mut second).packets, 1);
    assert_eq!(sender.flush(&mut first).packets, 0);
}

/// The threads seal packets under a common lock, like a connection's lock, and send them without the lock.
#[test]
fn packets_of_a_connection_are_sent_in_sealing_order() {
    const THREADS: usize = 4;
    const TURNS: usize = 2000;
    let to = SocketAddr::from(([127, 0, 0, 1], 9));
    let connection = Arc::<SendHandover>::default();
    let next = Mutex::new(0);
    let sent = Mutex::new(Vec::new());
    let work = || {
        let mut batch = PacketBatch::default();
        for turn in 0..TURNS {
            {
                let mut next = next.lock();
                batch.add_connection(&connection, |batch| {
                    for _ in 0..=turn % 3 {
                        push(batch, to, &usize::to_be_bytes(*next));
                        *next += 1;
                    }
                });
            }
            std::thread::yield_now();
            in_turn(&mut batch, |batch| {
                let numbers: Vec<_> = batch.iter().map(|(_, bytes)| bytes.try_into().unwrap()).collect();
                sent.lock().extend(numbers.into_iter().map(usize::from_be_bytes));
                batch.clear();
            });
        }
    };
    std::thread::scope(|scope| (0..THREADS).for_each(|_| drop(scope.spawn(work))));
    let sent = sent.into_inner();
    let next = next.into_inner();
    assert_eq!(sent, (0..next).collect::<Vec<_>>());
}

#[test]
fn dropped_unsent_batch_does_not_block_its_connection() {
    let to = SocketAddr::from(([127, 0, 0, 1], 9));
    let connection = Arc::<SendHandover>::default();
    let mut first = PacketBatch::default();
    let mut second = PacketBatch::default();
    seal(&mut first, &connection, to, 0..1);
    seal(&mut second, &connection, to, 1..2);
    assert!(second.is_empty());
    drop(first);
    seal(&mut second, &connection, to, 2..3);
    assert_eq!(second.len(), 1);
}
