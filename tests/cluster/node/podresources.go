package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"
	resources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// printPodResources prints what a kubelet has given to each container: podresources SOCKET. The answer of List, as JSON; numbers of 64 bits are strings.
func printPodResources(socket string) error {
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	answer, err := resources.NewPodResourcesListerClient(connection).List(ctx, &resources.ListPodResourcesRequest{})
	if err != nil {
		return err
	}
	text, err := protojson.MarshalOptions{EmitUnpopulated: true}.Marshal(answer)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(os.Stdout, string(text))
	return err
}
