"""Remote calls on a cluster: start a `Cluster`, register functions with `remote`, schedule them with a `Dispatcher`
and wait for their `RemoteValue`s. `RemoteWorker` is a worker that is started by hand. The names are imported when
they are first used, without torch.
"""
