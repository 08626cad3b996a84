// A server and a client that know nothing of Millrace, by Go's net alone: without cgo they are static binaries, whose system
// calls no preloaded library sees.
//
//	go-pair server ADDRESS
//	go-pair client ADDRESS CONNECTIONS BYTES
//
// The client makes its connections at once, asks on each for so many bytes, and ends its half. The server says whom it sees,
// sends the bytes, and ends. The client compares bytes and addresses, and prints a line for each connection: its own address,
// the server's, and the bytes.
package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
)

const (
	block     = 64 << 10
	bytesMost = 1 << 40
)

// What is asked for: which bytes, and how many.
type request struct{ Seed, Length uint64 }

// Bytes that follow no pattern which a lost or doubled piece would keep (xorshift64*).
type noise struct {
	state, left uint64
}

func (n *noise) Read(into []byte) (int, error) {
	if n.left == 0 {
		return 0, io.EOF
	}
	length := uint64(len(into)) &^ 7
	if n.left < length {
		length = n.left
	}
	var word [8]byte
	for at := uint64(0); at < length; at += 8 {
		n.state ^= n.state >> 12
		n.state ^= n.state << 25
		n.state ^= n.state >> 27
		binary.BigEndian.PutUint64(word[:], n.state*0x2545f4914f6cdd1d)
		copy(into[at:length], word[:])
	}
	n.left -= length
	return int(length), nil
}

func (r request) bytes() io.Reader { return &noise{state: r.Seed | 1, left: r.Length} }

func serve(conn net.Conn) error {
	defer conn.Close()
	var asked request
	if err := binary.Read(conn, binary.BigEndian, &asked); err != nil {
		return err
	}
	if asked.Length > bytesMost {
		return fmt.Errorf("%d bytes are more than there are", asked.Length)
	}
	if _, err := conn.Read(make([]byte, 1)); err != io.EOF {
		return fmt.Errorf("the client's half did not end: %v", err)
	}
	out := bufio.NewWriterSize(conn, block)
	fmt.Fprintln(out, conn.RemoteAddr(), conn.LocalAddr())
	// Not io.Copy's own buffer, whose size is no matter of the bytes.
	if _, err := io.CopyBuffer(struct{ io.Writer }{out}, asked.bytes(), make([]byte, block)); err != nil {
		return err
	}
	return out.Flush()
}

func server(address string) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	for {
		conn, err := listener.Accept()
		if err != nil {
			return err
		}
		go func() {
			if err := serve(conn); err != nil {
				fmt.Fprintln(os.Stderr, conn.RemoteAddr(), err)
			}
		}()
	}
}

func ask(address string, asked request) (string, error) {
	dialed, err := net.Dial("tcp", address)
	if err != nil {
		return "", err
	}
	conn := dialed.(*net.TCPConn)
	defer conn.Close()
	near, far := conn.LocalAddr().String(), conn.RemoteAddr().String()
	if far != address {
		return "", fmt.Errorf("connected to %s, and this is %s", address, far)
	}
	if err := binary.Write(conn, binary.BigEndian, asked); err != nil {
		return "", err
	}
	if err := conn.CloseWrite(); err != nil {
		return "", err
	}
	in := bufio.NewReaderSize(conn, block)
	seen, err := in.ReadString('\n')
	if err != nil {
		return "", err
	}
	if wanted := fmt.Sprintln(near, far); seen != wanted {
		return "", fmt.Errorf("the server sees %q, and this is %q", seen, wanted)
	}
	if err := compare(in, asked.bytes()); err != nil {
		return "", err
	}
	return fmt.Sprintln(near, far, asked.Length), nil
}

func compare(got, wanted io.Reader) error {
	one, other := make([]byte, block), make([]byte, block)
	for at := 0; ; {
		length, end := io.ReadFull(wanted, other)
		if _, err := io.ReadFull(got, one[:length]); err != nil {
			return fmt.Errorf("after %d bytes: %w", at, err)
		}
		if !bytes.Equal(one[:length], other[:length]) {
			return fmt.Errorf("other bytes came than were sent, after %d", at)
		}
		at += length
		if end != nil {
			break
		}
	}
	if _, err := got.Read(one[:1]); err != io.EOF {
		return fmt.Errorf("more came than was asked for: %v", err)
	}
	return nil
}

func client(address string, connections, length uint64) error {
	type came struct {
		line string
		err  error
	}
	results := make(chan came)
	for number := uint64(1); number <= connections; number++ {
		go func(seed uint64) {
			line, err := ask(address, request{seed * 0x9e3779b97f4a7c15, length})
			results <- came{line, err}
		}(number)
	}
	for ; connections > 0; connections-- {
		result := <-results
		if result.err != nil {
			return result.err
		}
		fmt.Print(result.line)
	}
	return nil
}

func run(args []string) error {
	usage := errors.New("wants: server ADDRESS, or client ADDRESS CONNECTIONS BYTES")
	switch {
	case len(args) == 2 && args[0] == "server":
		return server(args[1])
	case len(args) == 4 && args[0] == "client":
		connections, err := strconv.ParseUint(args[2], 10, 16)
		if err != nil {
			return err
		}
		length, err := strconv.ParseUint(args[3], 10, 40)
		if err != nil {
			return err
		}
		return client(args[1], connections, length)
	}
	return usage
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "go-pair:", err)
		os.Exit(1)
	}
}
