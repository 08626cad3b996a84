// A QUIC server on quic-go behind the gate of another process. `millrace gate` guards the port and tracks connection
// IDs. The server counts each client's connections through the gate's control socket, and needs no privileges. It
// answers "hello" on every bidirectional stream.
//
// quic-go reads only its own tokens, so it cannot use the gate's Retry: leave rule `retry` off, and let quic-go
// validate addresses by itself (quic.Transport.VerifySourceAddress).
//
//	go run . /run/millrace/gate.sock web 192.0.2.1:4433 cert.pem key.pem
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/quic-go/quic-go"
)

// gate is a connection to the gate's control socket. When the connection ends, the gate forgets the counts that were
// sent on it, because a server that died has no clients. After a restart of the gate, the server sends its counts
// again.
type gate struct {
	path, scope string

	lock    sync.Mutex
	clients map[netip.Addr]int
	conn    net.Conn
	answers *json.Decoder
}

type request struct {
	Do     string     `json:"do"`
	Scope  string     `json:"scope"`
	Client netip.Addr `json:"client"`
}

// count adds or removes one connection of a client. If the gate fails, the server goes on without it.
func (g *gate) count(client netip.Addr, change int) {
	g.lock.Lock()
	defer g.lock.Unlock()
	g.clients[client] += change
	do := "inc"
	if change < 0 {
		do = "dec"
	}
	if g.clients[client] == 0 {
		delete(g.clients, client)
	}
	if g.conn == nil {
		g.retry()
		return
	}
	if err := g.ask(request{do, g.scope, client}); err != nil {
		log.Print("gate: ", err)
		g.retry()
	}
}

// retry connects again and sends all counts. If it fails, the next change of a count tries again.
func (g *gate) retry() {
	if err := g.connect(); err != nil {
		log.Print("gate: ", err)
	}
}

func (g *gate) connect() error {
	if g.conn != nil {
		g.conn.Close()
		g.conn = nil
	}
	conn, err := net.Dial("unix", g.path)
	if err != nil {
		return err
	}
	g.conn, g.answers = conn, json.NewDecoder(bufio.NewReader(conn))
	for client, connections := range g.clients {
		for range connections {
			if err := g.ask(request{"inc", g.scope, client}); err != nil {
				g.conn.Close()
				g.conn = nil
				return err
			}
		}
	}
	return nil
}

func (g *gate) ask(request request) error {
	line, err := json.Marshal(request)
	if err != nil {
		return err
	}
	g.conn.SetDeadline(time.Now().Add(time.Second))
	if _, err := g.conn.Write(append(line, '\n')); err != nil {
		return err
	}
	var answer struct {
		Ok    bool
		Error string
	}
	if err := g.answers.Decode(&answer); err != nil {
		return err
	}
	if !answer.Ok {
		return errors.New(answer.Error)
	}
	return nil
}

// serve answers the streams of a connection whose handshake is complete, so the client's address is validated.
func serve(conn *quic.Conn, g *gate) {
	client := conn.RemoteAddr().(*net.UDPAddr).AddrPort().Addr().Unmap()
	g.count(client, 1)
	defer g.count(client, -1)
	for {
		stream, err := conn.AcceptStream(context.Background())
		if err != nil {
			return
		}
		go func() {
			io.Copy(io.Discard, io.LimitReader(stream, 64*1024))
			io.WriteString(stream, "hello\n")
			stream.Close()
		}()
	}
}

func main() {
	if len(os.Args) != 6 {
		log.Fatalf("usage: %s SOCKET SCOPE ADDRESS:PORT CERTIFICATE KEY", os.Args[0])
	}
	certificate, err := tls.LoadX509KeyPair(os.Args[4], os.Args[5])
	if err != nil {
		log.Fatal(err)
	}
	g := &gate{path: os.Args[1], scope: os.Args[2], clients: map[netip.Addr]int{}}
	if err := g.connect(); err != nil {
		log.Fatal(err)
	}
	tls := &tls.Config{Certificates: []tls.Certificate{certificate}, NextProtos: []string{"hello"}}
	listener, err := quic.ListenAddr(os.Args[3], tls, nil)
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	fmt.Println("ready")
	for {
		conn, err := listener.Accept(ctx)
		if err != nil {
			return
		}
		go serve(conn, g)
	}
}
