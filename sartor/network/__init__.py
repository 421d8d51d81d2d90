"""A federation over a network: a seam for transports, and the two sides of a round behind it.

::

    messages.py    trees and settings as bytes (safetensors and JSON, never pickle)
    transport.py   the seam: send each client its message, collect by a deadline, who is there
    client.py      one client: its data, its private states, and what it does with a message
    vault.py       where a client keeps its private states, one generation per accepted upload
    office.py      the server's orders and the answers: numbers, deadlines, what went wrong
    server.py      the rounds of a simulation with the clients' part sent away
    coordinator.py the simulation on top of them: the server of a federation, and its checkpoints
    roster.py      what the server knows of data that it does not have
    welcome.py     clients that come when training is over
    revocation.py  who may come in, and whose certificate was withdrawn
    admission.py   what is checked before an answer of a client touches the server's state

A method knows nothing of this. The order of a round stays in `engines/round.py`: the server runs
it with the clients' part replaced by messages, and a client runs that part for its one lane.
"""
