"""Communication between ranks and processes: collectives over an axis of ranks, shared memory, codecs, the rendezvous
store, and messages over ZeroMQ. Models, plans and strategies are not known here.

May import `native`.
Start reading at `axis.Axis`.
"""
