"""A federation over a network: a protocol for transports, and the two sides of a round.

::

    both sides
      messages.py       trees and settings as bytes (safetensors and JSON, never pickle)
      transport.py      the protocol: send messages, collect answers by a deadline, who is there
      flare.py          the transport of real federations, on NVIDIA FLARE: what both its ends share
      keys.py           a project's authority and certificates, and the kit of every party
      revocation.py     who may come in, and whose certificate was withdrawn
    a client
      flare_client.py   its end of the transport
      client.py         one client: its data, and what it does with a message
      client_work.py    how it does that: the work of a simulation with one lane
      client_state.py   where it keeps its private states, one for every accepted upload
    the server
      flare_server.py   its end of the transport
      serve.py          its work from the first client to the last round
      newcomers.py      its work for clients that come when training is over
      coordinator.py    the server: registered clients, a simulation, and its checkpoints
      registration.py   which clients are there, and what they report of their data
      remote_work.py    the work of clients in that simulation, as orders and answers
      dispatch.py       orders out, answers in: numbers, deadlines, what went wrong
      admission.py      what is checked before an answer touches its state
      remote_data.py    what it knows of data that it does not have
      status.py         the file that says how far it is

A method knows nothing of this. A round is that of `engines/round.py`: the server runs it with
`Remote` for the clients' work (`engines/work.py`), and a client runs that work for its one lane.
"""
