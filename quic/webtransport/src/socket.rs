/// Implements those methods of `quinn::AsyncUdpSocket` that describe a socket, for a type that wraps another one in its
/// field `socket`.
#[macro_export]
macro_rules! described_by_field_socket {
    () => {
        fn local_addr(&self) -> ::std::io::Result<::std::net::SocketAddr> {
            self.socket.local_addr()
        }

        fn max_transmit_segments(&self) -> usize {
            self.socket.max_transmit_segments()
        }

        fn max_receive_segments(&self) -> usize {
            self.socket.max_receive_segments()
        }

        fn may_fragment(&self) -> bool {
            self.socket.may_fragment()
        }
    };
}
