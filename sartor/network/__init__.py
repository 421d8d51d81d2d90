"""A federation over a network: a seam for transports, and the two sides of a round behind it.

::

    both sides
      messages.py       trees and settings as bytes (safetensors and JSON, never pickle)
      transport.py      the seam: send each client its message, collect by a deadline, who is there
      flare.py          the transport of real federations, on NVIDIA FLARE: what both its ends share
      keys.py           a project's authority and certificates, and the kit of every party
      revocation.py     who may come in, and whose certificate was withdrawn
      extra.py          what to say where the packages for all that are missing
    a client
      flare_client.py   its end of the transport
      client.py         one client: its data, and what it does with a message
      workbench.py      where it does it: the rounds of a simulation with one lane
      vault.py          where it keeps its private states, one generation per accepted upload
    the server
      flare_server.py   its end of the transport
      serve.py          its work from the first client to the last round
      welcome.py        its work for clients that come when training is over
      coordinator.py    the simulation whose clients are elsewhere, and its checkpoints
      remote_rounds.py  the rounds of that simulation, with the clients' part sent away
      office.py         its orders and the answers: numbers, deadlines, what went wrong
      admission.py      what is checked before an answer touches its state
      roster.py         what it knows of data that it does not have
      board.py          the file that says how far it is

A method knows nothing of this. The order of a round stays in `engines/round.py`: the server runs
it with the clients' part replaced by messages, and a client runs that part for its one lane.
"""
